"""Exports a plan as the JSON of `deepspeed.initialize`.

Option names are those of DeepSpeed edaa722 (`runtime/config.py`, `runtime/zero/config.py`), August
2026.
"""

from __future__ import annotations

import json
from typing import Any

from graphaccel.planner.plan.plan import Plan
from graphaccel.report.facts import Facts
from graphaccel.report.targets.common import (
    FP32,
    NO_OFFLOAD,
    RESHARDS,
    Refused,
    refuse_common,
)


def deepspeed(facts: Facts, refused: Refused) -> str:
    """The JSON text."""
    plan = facts.plan
    refuse_common(facts, refused, "DeepSpeed")
    _refuse(plan, refused)
    content: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.microbatches,
        "zero_optimization": _zero(plan, refused),
    }
    if plan.tensor > 1:
        content["tensor_parallel"] = {"autotp_size": plan.tensor}
    content |= _precision(plan)
    return json.dumps(content, indent=2) + "\n"


def _refuse(plan: Plan, refused: Refused) -> None:
    if plan.pipeline > 1:
        refused.add(
            f"pipeline {plan.pipeline}: its pipelines need the model rewritten as a PipelineModule",
            (("pipeline", 1),),
        )
    for axis in ("context", "expert"):
        if plan.ranks(axis) > 1:
            refused.add(
                f"{axis} {plan.ranks(axis)}: it is set up in the model's code", ((axis, 1),)
            )
    if plan.recompute:
        refused.add(
            "recomputation: it is called in the model's code, not set in this file",
            (("recompute", "none"),),
        )
    if plan.zero == 3 and plan.reshard_after_forward == "never":
        refused.add(
            "reshard_after_forward='never': its ZeRO-3 gathers again for the backward", RESHARDS
        )


def _zero(plan: Plan, refused: Refused) -> dict[str, Any]:
    """What is sharded over the data axis, and what of it is on the host."""
    stage = plan.zero
    if plan.holds_gathered:  # full 16-bit weights, their float32 masters sharded
        stage = 2 if plan.accumulation == "shards" else 1
    elif "parameters" in plan.offload:  # also on one device: the ZeRO stage keeps them there
        stage = 3
    content: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "reduce_bucket_size": plan.bucket_bytes // FP32,
    }
    if plan.shard_size and stage < 3:
        refused.add(
            f"zero {stage} in groups of {plan.shard_size}: its MiCS is of zero 3",
            (("zero", 3), ("shard_size", plan.data)),
        )
    elif plan.shard_size and plan.offload:
        refused.add(
            f"zero 3 in groups of {plan.shard_size}: its MiCS keeps nothing on the host",
            (("shard_size", plan.data), *NO_OFFLOAD),
        )
    elif plan.shard_size:
        content["mics_shard_size"] = plan.shard_size
    if "optimizer" in plan.offload and not stage:
        refused.add(
            "optimizer state on the host without zero: it is part of its ZeRO",
            (("zero", 1), *NO_OFFLOAD),
        )
    elif "optimizer" in plan.offload:
        where = {"device": "cpu", "pin_memory": True}
        content["offload_optimizer"] = where
        if "parameters" in plan.offload:
            content["offload_param"] = where
    return content


def _precision(plan: Plan) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if plan.precision.compute == "bfloat16":
        content["bf16"] = {"enabled": True}
    if plan.precision.compute == "float16":
        content["fp16"] = {"enabled": True, "loss_scale": 0 if plan.precision.scaled else 1}
    if plan.precision.compute != "float32":
        content["communication_data_type"] = {"float32": "fp32", "bfloat16": "bf16"}.get(
            plan.precision.reduce, "fp16"
        )
    return content
