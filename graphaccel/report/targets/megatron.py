"""Exports a plan as flags of Megatron-LM's training scripts.

Option names are those of Megatron-LM d98e8a6 (`training/arguments.py`,
`model_parallel_config.py`), August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from graphaccel.planner.plan.axis_orders import DATA_OUTSIDE
from graphaccel.planner.plan.plan import Plan
from graphaccel.report.facts import Facts
from graphaccel.report.targets.common import (
    FP32,
    NO_OFFLOAD,
    RECOMPUTE_OR_NOT,
    RESHARDS,
    Refused,
    about,
    layers,
    recomputes_all,
    refuse_common,
)

_Flags: TypeAlias = list[tuple[str, Any]]  # (name, value; None for a flag without one)
_DTYPES: Mapping[str, list[str]] = {"float32": [], "bfloat16": ["bf16"], "float16": ["fp16"]}


def megatron(facts: Facts, refused: Refused) -> str:
    """The flags, one a line."""
    plan = facts.plan
    refuse_common(facts, refused, "Megatron-LM")
    _refuse(plan, refused)
    flags = [
        *_axes(facts), *_precision(plan), *_gradients(plan), *_sharded(plan, refused),
    ]  # fmt: skip
    _refuse_offload(plan, refused)
    if plan.recompute:
        flags += _recompute(facts, refused)
    lines = [f"--{name}" if value is None else f"--{name} {_shell(value)}" for name, value in flags]
    return "\n".join([f"# {about(facts)}", *lines]) + "\n"


def _refuse(plan: Plan, refused: Refused) -> None:
    """Refuse schedules and orders of the axes that it does not have."""
    known = "interleaved" if plan.interleave > 1 else "1f1b"
    if plan.pipeline > 1 and plan.schedule != known:
        refused.add(
            f"schedule {plan.schedule}: Megatron-LM has 1f1b, plain and interleaved",
            (("schedule", known),),
        )
    if plan.interleave > 1 and plan.microbatches % plan.pipeline:
        refused.add(
            f"{plan.microbatches} microbatches: its interleaved schedule takes a "
            f"multiple of pipeline {plan.pipeline}",
            (("interleave", 1),),
        )
    usual = tuple(axis for axis in DATA_OUTSIDE if axis in plan.reordered)
    if plan.reordered and plan.reordered != usual:
        refused.add(
            f"axes in the order {', '.join(plan.reordered)}: it has pipeline or "
            "data outermost, and tensor innermost"
        )


def _axes(facts: Facts) -> _Flags:
    """Flags of the mesh, the batch and the stages."""
    plan = facts.plan
    flags: _Flags = [
        ("tensor-model-parallel-size", plan.tensor),
        ("pipeline-model-parallel-size", plan.pipeline),
        ("context-parallel-size", plan.context),
        ("expert-model-parallel-size", plan.expert),
        ("micro-batch-size", plan.microbatch_size),
        ("global-batch-size", plan.batch),
    ]
    if plan.tensor > 1 and plan.sequence:
        flags.append(("sequence-parallel", None))
    if plan.context > 1 and plan.context_by:
        by = {"heads": "a2a", "sequence": "all_gather"}[plan.context_by]
        flags.append(("cp-comm-type", by))
    if plan.expert > 1:
        flags.append(("moe-token-dispatcher-type", "alltoall"))
    if plan.reordered:
        flags.append(("use-tp-pp-dp-mapping", None))
    if plan.pipeline > 1:
        flags.append(("pipeline-model-parallel-layout", _layout(layers(facts))))
        if plan.tensor > 1 and not plan.scatter_sends and not plan.sequence:
            flags.append(("no-scatter-gather-tensors-in-pipeline", None))
    return flags


def _precision(plan: Plan) -> _Flags:
    flags: _Flags = [(name, None) for name in _DTYPES[plan.precision.compute]]
    if plan.precision.planned_only:
        flags.append(("fp8-format", "hybrid"))
    if plan.precision.reduce == "float32" and plan.precision.compute != "float32":
        flags.append(("accumulate-allreduce-grads-in-fp32", None))
    return flags


def _gradients(plan: Plan) -> _Flags:
    if plan.data == 1:
        return []
    flags: _Flags = [("overlap-grad-reduce", None)]
    if plan.zero <= 1 or plan.holds_gathered:
        flags.append(("ddp-bucket-size", plan.bucket_bytes // FP32))
    return flags


def _sharded(plan: Plan, refused: Refused) -> _Flags:
    """Flags of what is sharded over the data axis."""
    flags: _Flags = []
    if plan.zero == 1 or plan.holds_gathered:
        flags += _distributed_optimizer(plan, refused)
    elif plan.zero > 1:
        kept = {2: "optim_grads", 3: "optim_grads_params"}[plan.zero]
        flags += [
            ("use-megatron-fsdp", None), ("ckpt-format", "fsdp_dtensor"),
            ("data-parallel-sharding-strategy", kept),
        ]  # fmt: skip
        if plan.shard_size:  # `no_shard`: nothing more is sharded over the replicas
            flags.append(("outer-dp-sharding-strategy", "no_shard"))
        if plan.zero == 3 and plan.reshard_after_forward == "never":
            refused.add(
                "reshard_after_forward='never': its FSDP gathers again for the backward", RESHARDS
            )
    if plan.shard_size:
        flags.append(("num-distributed-optimizer-instances", plan.num_replicas))
    return flags


def _distributed_optimizer(plan: Plan, refused: Refused) -> _Flags:
    flags: _Flags = [("use-distributed-optimizer", None)]
    if plan.holds_gathered:  # 16-bit weights are replicated there, their masters sharded
        flags.append(("overlap-param-gather", None))
        if plan.microbatches > 1 and plan.accumulation == "shards":
            refused.add(
                "gradients reduced in each microbatch: its distributed optimizer "
                "reduces them once a step",
                (("accumulation", "whole"),),
            )
    if "optimizer" in plan.offload:
        flags += [
            ("use-precision-aware-optimizer", None),
            ("optimizer-cpu-offload", None),
            ("optimizer-offload-fraction", 1.0),
        ]
    return flags


def _refuse_offload(plan: Plan, refused: Refused) -> None:
    if "parameters" in plan.offload:
        refused.add(
            "parameters on the host: its CPU offload is of optimizer state alone", NO_OFFLOAD
        )
    elif "optimizer" in plan.offload and plan.zero != 1 and not plan.holds_gathered:
        refused.add(
            "optimizer state on the host: it is part of its distributed optimizer, zero 1",
            (("zero", 1), *NO_OFFLOAD),
        )


def _layout(counts: Sequence[int]) -> str:
    """`Et*2|t*3|t*3L`: embedding, layers, loss, stages separated by `|`."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    return f"E{'|'.join(stages)}L"


def _recompute(facts: Facts, refused: Refused) -> _Flags:
    """All layers, or the first ones of every rank's stages."""
    if recomputes_all(facts):
        return [
            ("recompute-granularity", "full"),
            ("recompute-method", "uniform"),
            ("recompute-num-layers", 1),
        ]
    counts = {stage.recomputed for stage in facts.stages}
    if len(counts) > 1 or not all(stage.recomputed_first for stage in facts.stages):
        refused.add(
            "which blocks are recomputed: it is the same number of first layers on "
            "every stage, or all",
            RECOMPUTE_OR_NOT,
        )
    return [
        ("recompute-granularity", "full"),
        ("recompute-method", "block"),
        ("recompute-num-layers", max(counts)),
    ]


def _shell(value: Any) -> str:
    text = str(value)
    return f'"{text}"' if "|" in text or "*" in text else text
