"""What the fused head and loss of a language model save: peak bytes, predicted and measured.

Predicted: Llama-3-8B's shapes, 8192 tokens on each of 8 H200s, bf16, ZeRO-3; nothing is run.
Measured: a small Llama, 32,000 words and 2048 tokens, on this machine's CPU in float32; every
tensor counted that an operator makes, those inside of the fused one too, beside the prediction.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

import graphaccel
from benchmarks.shared.common import RESULTS
from graphaccel.errors.messages import columns
from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.runtime.meter import PeakMeter

CHOICES = {"whole logits": "off", "fused head and loss": ("linear_cross_entropy",)}


class _Inside(PeakMeter):
    """Counts what fused ops make inside, too."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        fusion = fusion_of(func)
        if fusion is None or is_backward(func) or fusion.forward is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return fusion.forward(*args)


def _llama(**sizes: int) -> nn.Module:
    config = transformers.LlamaConfig(use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config).train()


def predicted(fusions: Any) -> dict[str, Any]:
    """The fullest rank of Llama-3-8B."""
    with torch.device("meta"):
        model = _llama(
            hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(8, 8192, dtype=torch.int64)
    plan = graphaccel.plan(
        model, {"input_ids": ids, "labels": ids.clone()}, devices=8, device="h200-141gb",
        optimizer=optimizer, data=8, zero=3, microbatches=1, precision="bf16", recompute="none",
        fusions=fusions, compile="off",
    )  # fmt: skip
    assert plan.prediction is not None
    fullest = max(plan.prediction.memory, key=lambda m: m.peak)
    return {
        "peak": fullest.peak, "activation": fullest.activation, "temporary": fullest.temporary,
        "at": fullest.at,
    }  # fmt: skip


def measured(fusions: Any) -> dict[str, Any]:
    """Peak tensor bytes of one training step, and what was predicted for it."""
    torch.manual_seed(0)
    model = _llama(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, vocab_size=32000,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 32000, (4, 512))
    batch = {"input_ids": ids, "labels": ids.clone()}
    model, optimizer = graphaccel.optimize(
        model, optimizer, example_batch=batch, microbatches=1, recompute="none", fusions=fusions
    )
    for _ in range(2):  # the first makes what stays
        gc.collect()
        meter = _Inside([*model.parameters(), *model.buffers(), *batch.values()])
        with meter:
            loss = model(**batch).loss
            loss.backward()
        del loss
        optimizer.zero_grad()
    return {"measured": meter.peak, "predicted": model.graphaccel.predicted_pass_bytes}


def main() -> None:
    """Print the table; without options save benchmarks/results/head_memory.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_memory", description=__doc__)
    parser.add_argument("--small", action="store_true", help="the measured part; nothing is saved")
    small = parser.parse_args().small
    found: dict[str, Any] = {"small": {n: measured(f) for n, f in CHOICES.items()}}
    if not small:
        found["llama-3-8b"] = {n: predicted(f) for n, f in CHOICES.items()}
    rows = [("", "", "peak GB", "predicted GB", "at")]
    for model, sides in found.items():
        for name, row in sides.items():
            real = f"{row['measured'] / 1e9:.3f}" if "measured" in row else ""
            said = row["predicted"] if "measured" in row else row["peak"]
            rows.append((model, name, real, f"{said / 1e9:.3f}", row.get("at", "")))
    print("\n".join(columns(rows)))
    if not small:
        result = {"command": "python -m benchmarks.head_memory", **found}
        (RESULTS / "head_memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
