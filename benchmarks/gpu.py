"""What a GPU is needed for: kernels against the clone bandwidth, optimizers, whole training steps.

    python -m benchmarks.gpu            all of it; writes benchmarks/results/gpu.json
    python -m benchmarks.gpu --dry      the same code at toy sizes on the CPU; nothing is written

Every fusion that has kernels of its own is compared with float64 first (`fusion check`'s grid, on
the GPU), then timed beside eager and `torch.compile`; its bytes are operands and results, once
each. So are the steps of AdamW, Adam and SGD, beside torch's fused ones. Training steps are those
of eager, `torch.compile` with AdamW(fused=True), graphaccel, and graphaccel with compile="inductor"
or with cuda_graphs=True, in bfloat16 autocast or its like, in turn in one process; peak memory is
the allocator's, of one step.

What is wrong or fails is printed apart at the end and is in the file; the exit code is then 1. So
it is without a GPU: it says so and measures nothing. Toy sizes compile nothing and record nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.shared.common import RESULTS
from benchmarks.shared.gpu_kernels import (
    Call,
    Fault,
    Row,
    Scale,
    attention_faults,
    clone_bandwidth,
    compiled,
    kernel_rows,
    optimizer_rows,
    seconds,
    timed_or_told,
    with_kernels,
)
from graphaccel.errors.messages import columns
from graphaccel.kernels.jit import has_triton

SIDES = ("eager", "compile", "graphaccel", "inductor", "graphs")
REAL = Scale(
    "cuda", (1024, 2048, 4096, 8192), 1 << 30, 30,
    ("gpt2", "gpt2-medium", "bert-base", "bert-large", "llama-1b", "t5-base", "vit-large"),
)  # fmt: skip
TOY = Scale(
    "cpu", (64,), 1 << 16, 1, ("gpt2", "bert-base", "llama-1b", "t5-base", "vit-large"), True
)


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


def step_row(name: str, scale: Scale, faults: list[Fault]) -> Row:
    """Seconds a training step and peak bytes of each side, one after the other."""
    found: Row = {"model": name}
    for side in SIDES:
        gc.collect()
        where = {"name": name, "case": "training step"}
        measured = timed_or_told(side, lambda s=side: measured_step(name, s, scale), faults, where)
        found[side], found[f"{side}_bytes"] = measured or (None, None)
    return found


def measured_step(name: str, side: str, scale: Scale) -> tuple[float, int | None]:
    """Seconds of a step, and its peak bytes on a GPU."""
    step, peak = _step(name, side, scale), None
    if scale.device == "cuda":
        step()  # makes optimizer state, compiles, captures
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    return seconds(step, scale), peak


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
    call: Any = compiled(model) if side == "compile" and not scale.toy else model
    autocast = not ours

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=autocast):
            loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def machine(scale: Scale) -> dict[str, str]:
    """Device, driver and versions; "none" for what is not here."""
    known = {"torch": torch.__version__, "python": platform.python_version()}
    if scale.device == "cpu":
        return {"device": f"CPU ({platform.machine()})", "driver": "none", "cuda": "none",
                "triton": "none", **known}  # fmt: skip
    said = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    import triton

    return {
        "device": torch.cuda.get_device_name(), "driver": said.stdout.strip(),
        "cuda": str(torch.version.cuda), "triton": triton.__version__, **known,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save. 1 where there is no GPU, or anything is wrong or fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    kernels = [f.name for f in with_kernels(None)]
    for option, known in (("--fusions", kernels), ("--models", REAL.models)):
        parser.add_argument(option, nargs="*", metavar="NAME", choices=known, help="these alone")
    parser.add_argument("--widths", nargs="*", type=int, metavar="N", help="of rows; these alone")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default, of a whole run: "
                        "benchmarks/results/gpu.json")  # fmt: skip
    given = parser.parse_args(argv)
    if not given.dry and not (torch.cuda.is_available() and has_triton()):
        missing = "no CUDA device" if not torch.cuda.is_available() else "no Triton"
        print(f"{missing} here: nothing was measured (torch {torch.__version__})")
        return 1
    scale = TOY if given.dry else REAL
    if given.widths is not None:
        scale = replace(scale, widths=tuple(given.widths))
    models = scale.models if given.models is None else given.models
    clone = clone_bandwidth(scale)
    print(f"{'toy sizes on the CPU, ' if given.dry else ''}clone {clone / 1e9:.0f} GB/s")
    whole = not given.dry and (given.fusions, given.models, given.widths) == (None, None, None)
    output = RESULTS / "gpu.json" if whole and given.output is None else given.output
    result: dict[str, Any] = {
        "command": " ".join(("python -m benchmarks.gpu", *(argv or sys.argv[1:]))),
        "machine": machine(scale), "clone": clone,
    }  # fmt: skip

    def keep(part: str, rows: list[Row]) -> None:
        """Kept after each part, and each model: a machine may be taken away."""
        result[part] = rows
        if output is not None:
            output.write_text(json.dumps({**result, "faults": faults}, indent=1) + "\n")

    kernels, faults = kernel_rows(scale, clone, given.fusions)
    where = {"name": "attention of graphs", "case": "check"}
    device = scale.device
    faults += timed_or_told("its check", lambda: attention_faults(device), faults, where) or []
    _print(kernels)
    keep("kernels", kernels)
    shapes = [p.shape for p in _model("gpt2" if scale.toy else "gpt2-medium", scale, "meta")[0]]
    optimizers, wrong = optimizer_rows(shapes, scale, clone)
    faults += wrong
    _print(optimizers)
    keep("optimizers", optimizers)
    steps: list[Row] = []
    keep("steps", steps)
    for name in models:
        steps.append(step_row(name, scale, faults))
        keep("steps", steps)
    _print(steps)
    _print_faults(faults)
    return 1 if faults else 0


def _print(rows: list[Row]) -> None:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "  ".join(f"{k} {v}" for k, v in value.items())
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    head = tuple(dict.fromkeys(k for r in rows for k in r))
    if rows:
        print("\n".join(columns([head, *(tuple(shown(r.get(k)) for k in head) for r in rows)])))


def _print_faults(faults: list[Fault]) -> None:
    print(f"{len(faults)} FAULTS" if faults else "no faults")
    for fault in faults:
        print(f"  {fault['name']}: {fault['what']}\n      in {fault['case']}")


if __name__ == "__main__":
    sys.exit(main())
