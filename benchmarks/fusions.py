"""Which fusions are found in which models, and the bytes that a training step moves with them.

No timing: the graph is captured without weights, and bytes are what every kernel of the step reads
and writes, each operand once (`planner.profile.cost.node_bytes`). `floor`: the bytes of matmuls,
convolutions, attention and embeddings, which no fusion of this kind removes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn

from benchmarks.shared.common import RESULTS
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors.messages import columns
from graphaccel.kernels.register import fusion_of
from graphaccel.kernels.registry import enabled, fusion_named
from graphaccel.passes.fusion.fuse import find_sites, fuse
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.profile.chunk_rows import chunk_sizes
from graphaccel.planner.profile.cost import Sizes, in_chunks, node_bytes, node_work

LAYERS, BATCH, TOKENS = 4, 4, 512
_DENSE = ("mm", "addmm", "bmm", "linear", "matmul", "convolution", "attention", "embedding")


def _gpt2(attention: str, dropout: float) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=LAYERS, use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=0.0, attn_implementation=attention,
        )
    )  # fmt: skip


def _bert(attention: str, dropout: float) -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=LAYERS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _llama(attention: str, dropout: float) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=LAYERS,
            num_attention_heads=32, num_key_value_heads=4, use_cache=False,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _t5(attention: str, dropout: float) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=768, d_ff=2048, num_layers=LAYERS // 2, num_heads=12, dropout_rate=dropout,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False, use_cache=False,
            decoder_start_token_id=0, attn_implementation=attention,
        )
    )  # fmt: skip


def _vit(attention: str, dropout: float) -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=LAYERS, hidden_dropout_prob=dropout, num_labels=1000,
            attn_implementation=attention,
        )
    )  # fmt: skip


def _swin(attention: str, dropout: float) -> nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            depths=[2, 2], num_heads=[3, 6], hidden_dropout_prob=dropout, drop_path_rate=0.0,
            num_labels=1000, attn_implementation=attention,
        )
    )  # fmt: skip


def _mixtral(attention: str, dropout: float) -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=LAYERS,
            num_attention_heads=16, num_key_value_heads=4, num_local_experts=4, use_cache=False,
            attn_implementation=attention,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[str, float], nn.Module]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "swin": _swin,
    "mixtral": _mixtral,
}
FORMS = (
    ("sdpa", "fp32"), ("eager", "fp32"), ("sdpa", "bf16"), ("sdpa", "autocast"),
    ("eager", "autocast"), ("sdpa", "bf16, dropout"),
)  # fmt: skip


def captured(
    name: str,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
) -> StepGraph:
    """The step of one model, from shapes alone."""
    with torch.device("meta"):
        model = MODELS[name](attention, dropout).train().to(dtype)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids.clone()}
    if name in ("vit", "swin"):
        pixels = torch.zeros(BATCH, 3, 224, 224, dtype=dtype)
        batch = {"pixel_values": pixels, "labels": ids[:, 0].clone()}
    compiler = Compiler(Model(model, None, 2.0), cluster("h100-80gb", 1, None), {})
    return compiler.capture(as_batch(batch))[0]


def step_bytes(step: StepGraph, *, dense: bool = False) -> int:
    """Bytes a step moves; `dense`: by matmuls, attention and embeddings alone. What goes over its
    rows in chunks moves what each of them reads and writes, as many as are best on an H100."""
    sizes, device = Sizes(step.sizes), cluster("h100-80gb", 1, None).device
    parted = [n for n in step.graph.graph.nodes if in_chunks(n)]
    chunk = next(iter(chunk_sizes(parted, sizes, device)), 0)

    def moved(node: fx.Node) -> int:
        if in_chunks(node):
            return node_work(node, sizes, chunk, device.type).bytes
        return int(node_bytes(node, sizes))

    return sum(
        moved(n)
        for n in step.graph.graph.nodes
        if n.op == "call_function"
        and (not dense or any(d in str(n.target) for d in _DENSE))
        and not (dense and fusion_of(n.target) is not None)
    )


def measured(name: str, attention: str, form: str) -> dict[str, Any]:
    """Counts and bytes of one model in one form: "fp32", "bf16" (weights too), "autocast", or with
    a dropout of 0.1, for which the fusions that draw masks of their own are asked for."""
    low, drops = form.startswith("bf16"), form.endswith("dropout")
    kind = torch.bfloat16 if low else torch.float32
    step = captured(name, attention, kind, 0.1 if drops else 0.0)
    precision = Precision(compute="bfloat16") if form == "autocast" else Precision()
    step = lower_precision(step, Plan(1, precision=precision))
    asked = ("auto", "dropout_add_layer_norm", "dropout_add_rms_norm") if drops else "auto"
    plan = Plan(1, fusions=enabled(asked, "cuda"), precision=precision)
    _, sites = find_sites(step, tuple(fusion_named(n) for n in plan.fusions))
    fused = fuse(step, plan)
    return {
        "model": name,
        "attention": attention,
        "form": form,
        "fusions": dict(sorted(Counter(s.fusion.name for s in sites).items())),
        "bytes_before": step_bytes(step),
        "bytes_after": step_bytes(fused),
        "bytes_floor": step_bytes(step, dense=True),
        "nodes_before": len(step.graph.graph.nodes),
        "nodes_after": len(fused.graph.graph.nodes),
    }


def main() -> None:
    """Print the table and save benchmarks/results/fusions.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusions", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), help="one model; nothing is saved")
    chosen = parser.parse_args().model
    rows = []
    for name in MODELS if chosen is None else (chosen,):
        for attention, form in FORMS:
            if name in ("llama", "mixtral") and form.endswith("dropout"):
                continue  # it has none
            rows.append(measured(name, attention, form))
    head = ("model", "attention", "form", "MB before", "after", "floor", "ratio", "fusions")
    print(
        "\n".join(
            columns(
                (
                    head,
                    *(
                        (
                            r["model"], r["attention"], r["form"], f"{r['bytes_before'] / 1e6:.0f}",
                            f"{r['bytes_after'] / 1e6:.0f}", f"{r['bytes_floor'] / 1e6:.0f}",
                            f"{r['bytes_after'] / r['bytes_before']:.2f}",
                            ", ".join(f"{n} {c}" for n, c in r["fusions"].items()),
                        )
                        for r in rows
                    ),
                )
            )
        )
    )  # fmt: skip
    if chosen is None:
        result = {"command": "python -m benchmarks.fusions", "layers": LAYERS, "batch": BATCH,
                  "tokens": TOKENS, "rows": rows}  # fmt: skip
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "fusions.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
