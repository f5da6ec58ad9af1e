"""What all export targets share: refusals, and the decisions that none of them can express."""

from __future__ import annotations

from typing import NamedTuple

from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import Facts

FP32 = 4
"""Bytes of a float32."""


class Refusal(NamedTuple):
    """A decision that a target cannot express. instead: (pin, value) pairs that it can, each to
    plan again with; empty where there are none, or too many."""

    reason: str
    instead: tuple[tuple[str, object], ...] = ()


class Refused:
    """Collects what a target cannot express."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []

    def add(self, reason: str, instead: tuple[tuple[str, object], ...] = ()) -> None:
        """Add one."""
        self.refusals.append(Refusal(reason, instead))


RECOMPUTE_OR_NOT = (("recompute", "none"), ("recompute", "all"))
NO_OFFLOAD = (("offload", "none"),)
SHARDED_OR_NOT = (("zero", 0), ("zero", 2), ("zero", 3))
RESHARDS = (("reshard_after_forward", "always"),)
PER_MICROBATCH = "parameters gathered once a step: its FSDP gathers them in each microbatch"


def about(facts: Facts) -> str:
    """The plan in a line."""
    plan = facts.plan
    return f"{plan_name(plan)}: {plan.devices} x {facts.cluster.device.name}, batch {plan.batch}"


def layers(facts: Facts) -> list[int]:
    """The number of layers on each stage."""
    return [stage.blocks for stage in facts.stages]


def recomputes_all(facts: Facts) -> bool:
    """Whether every block is recomputed."""
    return bool(facts.plan.recompute) and len(facts.plan.recompute) == facts.model.blocks


def refuse_common(facts: Facts, refused: Refused, target: str) -> None:
    """Refuse what no target can express."""
    plan = facts.plan
    if plan.placements:
        names = ", ".join(name for name, _ in plan.placements)
        what = f"how single parameters are placed ({names})"
        refused.add(f"{what}: {target} decides that for a module")
    if plan.reordered and target != "Megatron-LM":
        refused.add(
            f"axes in the order {', '.join(plan.reordered)}: the mesh of {target} has "
            f"{', '.join(axis for axis in AXES if axis in plan.reordered)}"
        )
    if plan.outputs != "loss":
        refused.add(f'outputs="{plan.outputs}": {target} computes the loss only')
    if plan.precision.matmul == "tfloat32":
        refused.add(
            "matmuls in tfloat32: a setting of the script's own process, "
            'torch.backends.cuda.matmul.fp32_precision = "tf32"'
        )
    if plan.precision.planned_only and target != "Megatron-LM":
        refused.add(f"matmuls in 8 bits: {target} has them by settings of its own")
    if plan.selective:
        refused.add(
            f"which values recomputed blocks save: {target} has that by ops or modules of its own",
            RECOMPUTE_OR_NOT,
        )
    if "activations" in plan.offload:
        refused.add(
            f"activations on the host: {target} has that by module, or not at all", NO_OFFLOAD
        )
    if len(facts.stages) > 1 and not all(stage.whole_blocks for stage in facts.stages):
        refused.add(f"cuts inside a block: stages of {target} are whole layers", (("pipeline", 1),))


def refuse_unsharded_parameters(plan: Plan, refused: Refused) -> None:
    """Refuse parameters on the host with data 1: FSDP offloads shards only, those of parameters,
    gradients and optimizer state together."""
    if "parameters" in plan.offload and plan.data == 1:
        refused.add(
            "parameters on the host with data 1: they are there as shards of its FSDP", NO_OFFLOAD
        )
