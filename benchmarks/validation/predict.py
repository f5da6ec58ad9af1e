"""The step of a published run, predicted as `graphaccel plan` does it for any model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.validation.rows import Run
from graphaccel.capture.batch import Batch
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler import Compiler
from graphaccel.model import Model, as_batch
from graphaccel.planner.cluster import Cluster, cluster
from graphaccel.planner.layouts import Layouts
from graphaccel.planner.plan import Plan
from graphaccel.planner.search import search

_ADAM = 2.0


@dataclass(frozen=True)
class Predicted:
    """seconds of a step; bytes at the peak of the fullest rank; whether that fits the device."""

    seconds: float
    memory: int
    fits: bool
    plan: Plan


class Predictor:
    """Predicts runs; keeps the capture of each shape of model."""

    def __init__(self) -> None:
        self._shape: Any = None
        self._kept: tuple[StepGraph, Layouts] | None = None
        self._compiler: Compiler | None = None

    def predict(self, run: Run) -> Predicted:
        """Raises what planning raises, but for memory: a run that really ran is never refused."""
        where = cluster(run.device, run.devices)
        endless = replace(where, device=replace(where.device, memory=2**60))
        pins = {
            "data": run.data,
            "pipeline": run.pipeline,
            "tensor": run.tensor,
            "context": run.context,
            "expert": 1,
            "microbatches": run.microbatches,
            "recompute": run.recompute,
            "precision": run.precision,
            "zero": run.zero if run.data > 1 else 0,
            "sequence": run.sequence_parallel,
        }
        if run.pipeline > 1:
            pins["interleave"] = run.interleave
        if run.zero >= 2:
            pins["accumulation"] = "shards"  # FSDP reduces after every microbatch
        _, layouts = self._captured(run, endless)
        plan = search(
            layouts.whole.step,
            endless,
            pins=pins,
            optimizer_bytes=int(4 * _ADAM),
            batch=run.batch,
            profiles=layouts,
        )
        assert plan.prediction is not None
        peak = max(m.peak for m in plan.prediction.memory)
        return Predicted(plan.prediction.seconds, peak, peak <= where.device.memory, plan)

    def _captured(self, run: Run, where: Cluster) -> tuple[StepGraph, Layouts]:
        """The capture of the run's model, and its layouts on devices of this kind."""
        shape = run.shape, run.device, run.precision, run.devices
        if self._shape != shape:
            module, batch = _made(run)
            compiler = Compiler(Model(module, None, _ADAM), where, {})
            if self._compiler is not None and self._shape[0] == run.shape:
                compiler.captures = self._compiler.captures
            step, sizes = compiler.capture(batch)
            self._shape, self._compiler = shape, compiler
            self._kept = step, compiler.layouts(step, {**sizes, BATCH: run.batch})
        assert self._kept is not None
        return self._kept


def _made(run: Run) -> tuple[nn.Module, Batch]:
    import transformers

    attention = "sdpa" if run.fused_attention else "eager"
    if run.llama:
        config: Any = transformers.LlamaConfig(
            vocab_size=run.vocabulary, hidden_size=run.hidden, intermediate_size=run.ffn,
            num_hidden_layers=run.layers, num_attention_heads=run.heads,
            num_key_value_heads=run.kv_heads, max_position_embeddings=run.sequence,
            use_cache=False, attn_implementation=attention,
        )  # fmt: skip
        kind: Any = transformers.LlamaForCausalLM
    else:
        config = transformers.GPT2Config(
            vocab_size=run.vocabulary, n_embd=run.hidden, n_inner=run.ffn, n_layer=run.layers,
            n_head=run.heads, n_positions=run.sequence, use_cache=False, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation=attention,
            bos_token_id=0, eos_token_id=0, activation_function="gelu_pytorch_tanh",
        )  # fmt: skip
        kind = transformers.GPT2LMHeadModel
    with torch.device("meta"):
        module = kind(config).train()
        tokens = torch.zeros(2, run.sequence, dtype=torch.int64)
    return module, as_batch({"input_ids": tokens, "labels": tokens})
