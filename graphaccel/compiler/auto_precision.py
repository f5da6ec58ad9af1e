"""`precision="auto"`: the precision in which a model is predicted to be fastest on its devices."""

from __future__ import annotations

from collections.abc import Callable

from graphaccel.errors import BadPin, ConflictingPins, InfeasiblePlan
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.efficiency import peak_flops
from graphaccel.planner.search.reasons import seconds, time_text

AUTO = "auto"
_OFFERED = ("fp32", "bf16", "bf16-params", "fp8")
"""From the one that changes numerics least."""
_WORTH = 1.03  # as much faster must a precision be that changes numerics more


def precisions_of(device: Device) -> tuple[str, ...]:
    """The precisions that "auto" compares: float32, and those that can be run and whose matmuls are
    faster on the device."""
    usual, names = peak_flops(device, "float32"), ["fp32"]
    for name in _OFFERED[1:]:
        precision = PRECISIONS[name]
        faster = peak_flops(device, precision.matmul or precision.compute) > usual
        if faster and not precision.planned_only:
            names.append(name)
    return tuple(names)


def best_precision(device: Device, plan_in: Callable[[str], Plan]) -> tuple[str, str]:
    """(the precision whose plan is fastest, a note that says what it gains). plan_in: a plan in one
    precision; what can not be planned in it is left out.

    Raises what refused the first of them, where none has a plan."""
    plans: dict[str, Plan] = {}
    refused: BadPin | ConflictingPins | InfeasiblePlan | None = None
    for name in precisions_of(device):
        try:
            plans[name] = plan_in(name)
        except (BadPin, ConflictingPins, InfeasiblePlan) as error:
            refused = refused or error
    if refused is not None and not plans:
        raise refused
    best, *others = plans
    for name in others:
        if seconds(plans[name]) * _WORTH < seconds(plans[best]):
            best = name
    return best, _note(best, plans)


def _note(best: str, plans: dict[str, Plan]) -> str:
    rest = [f"{name} {time_text(seconds(plan))}" for name, plan in plans.items() if name != best]
    said = f"precision auto: {best}"
    if best != "fp32" and "fp32" in plans:
        gain = seconds(plans["fp32"]) / seconds(plans[best])
        said += f" is {gain:.1f} x as fast as fp32, and changes numerics"
    elif best != "fp32":
        said += " changes numerics; in fp32 no plan fits"
    else:
        said += ", as nothing else is worth changing numerics"
    return f"{said} ({', '.join(rest)})" if rest else said
