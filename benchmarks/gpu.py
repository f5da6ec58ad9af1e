"""What a GPU is needed for: kernels against the clone bandwidth, AdamW, and whole training steps.

    python -m benchmarks.gpu            all of it; writes benchmarks/results/gpu.json
    python -m benchmarks.gpu --dry      the same code at toy sizes on the CPU; nothing is written

Kernels are compared with float64 first (`fusion check`'s grid, on the GPU), then timed beside eager
and `torch.compile`; their bytes are operands and results, once each. Steps are those of eager,
`torch.compile` with AdamW(fused=True), graphaccel, and graphaccel with compile="inductor" or with
cuda_graphs=True, in bfloat16 autocast or its like, in turn in one process; peak memory is the
allocator's. Without a GPU it says so and measures nothing. Toy sizes compile and record nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.common import RESULTS
from graphaccel.kernels.check import check_numbers
from graphaccel.kernels.examples import example, sizes_of
from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.multi_tensor import AdamRule, MultiTensor
from graphaccel.kernels.register import op_of, parameters, tensors
from graphaccel.kernels.registry import fusion_named
from graphaccel.messages import columns

KERNELS = (
    "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "dropout_add_layer_norm",
    "dropout_add_rms_norm", "embedding_layer_norm", "scale_mask_softmax",
    "scale_mask_softmax_dropout",
)  # fmt: skip
Call = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    device: str
    widths: tuple[int, ...]
    elements: int
    rounds: int
    models: tuple[str, ...]
    toy: bool = False


REAL = Scale(
    "cuda", (1024, 2048, 4096, 8192), 1 << 26, 30,
    ("gpt2", "gpt2-medium", "bert-base", "bert-large", "llama-1b", "t5-base", "vit-large"),
)  # fmt: skip
TOY = Scale(
    "cpu", (64,), 1 << 12, 2, ("gpt2", "bert-base", "llama-1b", "t5-base", "vit-large"), True
)


def seconds(call: Call, scale: Scale) -> float:
    """Median seconds of a call on the device, its caches flushed before each."""
    for _ in range(3):
        call()
    if scale.device == "cpu":
        return statistics.median(timeit.repeat(call, repeat=scale.rounds, number=1))
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    marks = []
    for _ in range(scale.rounds):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def clone_bandwidth(scale: Scale) -> float:
    """Bytes a second that `clone` moves: what a kernel can reach."""
    source = torch.ones(scale.elements * 4, dtype=torch.bfloat16, device=scale.device)
    return 2 * source.numel() * source.element_size() / seconds(source.clone, scale)


def _bytes(values: Sequence[Any]) -> int:
    return sum(t.nbytes for t in values if isinstance(t, Tensor))


def kernel_rows(scale: Scale, clone: float) -> list[dict[str, Any]]:
    """Each kernel at each width: seconds beside eager and torch.compile, share of the clone."""
    rows = []
    for name in KERNELS:
        fusion = fusion_named(name)
        faults = [] if scale.toy else [f.what for f in check_numbers(fusion, scale.device)[1]]
        for width in scale.widths:
            sizes = {n: width for n in sizes_of(fusion)}
            named = [i for i in fusion.outputs["y"].indices if i != "..."]
            rest = scale.elements // width ** len(named)
            leading = (min(4, max(rest, 1)), max(rest // 4, 1))
            values = {
                n: v.to(scale.device) if isinstance(v, Tensor) else v
                for n, v in example(fusion, torch.bfloat16, sizes, leading).items()
            }
            rows += _phases(fusion, values, width, clone, scale)
            rows[-1]["faults"] = rows[-2]["faults"] = faults
    return rows


def _phases(
    fusion: Any, values: dict[str, Any], width: int, clone: float, scale: Scale
) -> list[dict[str, Any]]:
    op = op_of(fusion)
    pattern = fusion.patterns[0]
    names = parameters(pattern)
    compiled = torch.compile(pattern) if not scale.toy else pattern
    with torch.no_grad():
        made = tensors(op(*values.values()))
        ours = seconds(lambda: op(*values.values()), scale)
        given = {n: values[n] for n in names}
        eager = seconds(lambda: pattern(**given), scale)
        inductor = seconds(lambda: compiled(**given), scale)
    moved = _bytes([v for n, v in values.items() if n not in fusion.gathered] + made)
    moved += _bytes(made[:1]) if fusion.gathered else 0
    rows = [_row(fusion.name, "forward", width, moved, clone, ours, eager, inductor)]
    known = {**values, **dict(zip(fusion.results, made, strict=True))}
    known |= {f"grad_{n}": torch.randn_like(known[n]) for n in fusion.outputs}
    known["wanted"] = [True] * len(fusion.inputs)
    backward = getattr(torch.ops.graphaccel, f"{fusion.name}_backward").default
    given_back = [known[n] for n in fusion.read_back]
    with torch.no_grad():
        results = tensors(backward(*given_back))
        ours = seconds(lambda: backward(*given_back), scale)
    eager = _backward_seconds(pattern, given, fusion, scale)
    inductor = _backward_seconds(compiled, given, fusion, scale)
    moved = _bytes([known[n] for n in fusion.read_back if n not in fusion.gathered] + results)
    rows.append(_row(fusion.name, "backward", width, moved, clone, ours, eager, inductor))
    return rows


def _backward_seconds(call: Call, given: dict[str, Any], fusion: Any, scale: Scale) -> float:
    fresh = {
        n: v.detach().requires_grad_(True) if n in fusion.differentiable else v
        for n, v in given.items()
    }
    made = [t for t in tensors(call(**fresh)) if t.requires_grad]
    roots = [v for v in fresh.values() if isinstance(v, Tensor) and v.requires_grad]
    grads = [torch.randn_like(t) for t in made]
    return seconds(
        lambda: torch.autograd.grad(made, roots, grads, retain_graph=True, allow_unused=True), scale
    )


def _row(
    name: str, phase: str, width: int, moved: int, clone: float, ours: float, eager: float,
    inductor: float,
) -> dict[str, Any]:  # fmt: skip
    return {
        "kernel": name, "phase": phase, "width": width, "bytes": moved, "seconds": ours,
        "eager": eager, "compile": inductor, "of_clone": moved / ours / clone,
    }  # fmt: skip


def adamw_row(scale: Scale, clone: float) -> dict[str, Any]:
    """AdamW over the weights of GPT-2 medium: one launch against torch's fused one."""
    shapes = [p.shape for p in _model("gpt2" if scale.toy else "gpt2-medium", scale, "meta")[0]]
    params = [torch.randn(s, device=scale.device) * 0.02 for s in shapes]
    grads, first, second = ([torch.randn_like(p).abs() * 1e-3 for p in params] for _ in range(3))
    steps = [torch.zeros(()) for _ in params]
    many, rules = MultiTensor(), [AdamRule(1e-4, 0.9, 0.999, 1e-8, 0.1, True)] * len(params)
    ours = seconds(lambda: many.adam(params, grads, first, second, steps, rules), scale)
    trained = [nn.Parameter(p) for p in params]
    for p, g in zip(trained, grads, strict=True):
        p.grad = g
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, fused=True)
    moved = 28 * sum(p.numel() for p in params)
    theirs = seconds(optimizer.step, scale)
    return {
        "kernel": "adamw", "bytes": moved, "seconds": ours, "fused": theirs,
        "of_clone": moved / ours / clone,
    }  # fmt: skip


def _model(name: str, scale: Scale, device: str) -> tuple[list[nn.Parameter], nn.Module]:
    toy = scale.toy
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                **({"n_layer": 2, "n_embd": 64, "n_head": 4} if toy else {}),
            )
        ),
        "gpt2-medium": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=24, n_embd=1024, n_head=16, use_cache=False, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0,
            )
        ),
        "bert-base": lambda: _bert(small | {"intermediate_size": 128} if toy else {}),
        "bert-large": lambda: _bert(
            {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
             "intermediate_size": 4096}
        ),
        "llama-1b": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                use_cache=False, num_key_value_heads=4,
                **(small | {"vocab_size": 512, "intermediate_size": 128} if toy else {
                    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
                    "num_hidden_layers": 22, "num_attention_heads": 32}),
            )
        ),
        "t5-base": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
                **({"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16}
                   if toy else {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
            )
        ),
        "vit-large": lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(
                num_labels=1000,
                **(small | {"intermediate_size": 128} if toy else {
                    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                    "intermediate_size": 4096}),
            )
        ),
    }  # fmt: skip
    with torch.device(device):
        torch.manual_seed(1)
        model = makers[name]().train()
    return list(model.parameters()), model


def _bert(sizes: dict[str, int]) -> nn.Module:
    config = transformers.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    return transformers.BertForMaskedLM(config)


def _batch(name: str, scale: Scale) -> dict[str, Tensor]:
    rows, tokens = (2, 32) if scale.toy else (8, 1024 if "gpt2" in name or "llama" in name else 512)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 500, (rows, tokens), generator=generator)
    if name.startswith("vit"):
        images = rows if scale.toy else 64
        pixels = torch.randn(images, 3, 224, 224, generator=generator)
        batch = {"pixel_values": pixels, "labels": torch.arange(images)}
    else:
        batch = {"input_ids": ids, "labels": ids.clone()}
    return {k: v.to(scale.device) for k, v in batch.items()}


def step_row(name: str, scale: Scale) -> dict[str, Any]:
    """Seconds a training step and peak bytes of each side, one after the other."""
    found: dict[str, Any] = {"model": name}
    for side in ("eager", "compile", "graphaccel", "inductor", "graphs"):
        gc.collect()
        if scale.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found[side] = seconds(_step(name, side, scale), scale)
        if scale.device == "cuda":
            found[f"{side}_bytes"] = torch.cuda.max_memory_allocated()
    return found


def _step(name: str, side: str, scale: Scale) -> Call:
    _, model = _model(name, scale, scale.device)
    batch = _batch(name, scale)
    ours, fused = side in ("graphaccel", "inductor", "graphs"), side != "eager"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    if ours:
        import graphaccel

        kind = "inductor" if side == "inductor" and not scale.toy else "off"
        model, optimizer = graphaccel.optimize(
            model, optimizer, example_batch=batch, precision="bf16", fusions="auto", compile=kind,
            cuda_graphs=side == "graphs" and not scale.toy,
        )  # fmt: skip
    call: Any = torch.compile(model) if side == "compile" and not scale.toy else model
    autocast = not ours

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=autocast):
            loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def machine() -> dict[str, str]:
    """Device, driver and versions."""
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    import triton

    return {
        "device": torch.cuda.get_device_name(), "driver": said.stdout.strip(),
        "torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> int:
    """Measure, print and save. 1 where there is no GPU or a kernel is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU; nothing is saved")
    dry = parser.parse_args().dry
    if not dry and not (torch.cuda.is_available() and has_triton()):
        missing = "no CUDA device" if not torch.cuda.is_available() else "no Triton"
        print(f"{missing} here: nothing was measured (torch {torch.__version__})")
        return 1
    scale = TOY if dry else REAL
    clone = clone_bandwidth(scale)
    print(f"{'toy sizes on the CPU, ' if dry else ''}clone {clone / 1e9:.0f} GB/s")
    rows = kernel_rows(scale, clone)
    _print(rows)
    adamw = adamw_row(scale, clone)
    _print([adamw])
    steps = [step_row(name, scale) for name in scale.models]
    _print(steps)
    if not dry:
        result = {"command": "python -m benchmarks.gpu", "machine": machine(), "clone": clone,
                  "kernels": rows, "adamw": adamw, "steps": steps}  # fmt: skip
        (RESULTS / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(r["faults"] for r in rows) else 0


def _print(rows: list[dict[str, Any]]) -> None:
    def shown(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    head = tuple(dict.fromkeys(k for r in rows for k in r))
    print("\n".join(columns([head, *(tuple(shown(r.get(k, "")) for k in head) for r in rows)])))


if __name__ == "__main__":
    sys.exit(main())
