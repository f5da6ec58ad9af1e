"""Validates a plan from the user: its decisions are read back as pins and checked like pins.

A plan is plain data, which can be edited, or made by `dataclasses.replace`. It runs exactly as it
is written; a microbatch count that does not divide the batch, or a misspelt word, would train
something else.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin
from graphaccel.kernels.registry import enabled, without_tensor_axis
from graphaccel.planner.plan.base_plan import COMPILERS, PRECISIONS
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.read_pins import check_alone, read_pins
from graphaccel.planner.profile.block_recompute import block_values
from graphaccel.planner.profile.cost import in_chunks
from graphaccel.planner.search.capabilities import check_chunk
from graphaccel.sharding.solve.conversions import Rates

_NO_PIN = (
    "rates",
    "selective",
    "axis_placements",
)  # chosen together with other decisions, never pinned


def misread(plan: Plan) -> str | None:
    """The first field whose value does not have the type that `Plan` declares, as a sentence; None
    where all are right."""
    hints = get_type_hints(Plan)
    for f in fields(Plan):
        value = getattr(plan, f.name)
        if not _is(value, hints[f.name]):
            return f"{f.name} is {reprlib.repr(value)}, not {f.type}"
    return None


def check_given(plan: Plan, path: str, step: StepGraph | None = None) -> None:
    """Check every decision of a plan, alone and against the others; against the graph too, where it
    is given: the captured step in the plan's precision and with its fusions.

    path: how errors name the plan.

    Raises: BadPin (GA202), BatchNotDivisible (GA206), NoLoss (GA103).
    """
    try:
        _check_counts(plan)
        _check_rates(plan)
        pins = pins_of(plan)
        if step is None:
            check_alone(pins, plan.devices, plan.batch)
            return
        result = read_pins(pins, step, plan.devices, plan.batch, Limits())
        _check_selective(plan, step)
        check_chunk(result, any(map(in_chunks, step.graph.graph.nodes)))
    except BadPin as error:
        raise replace(error, plan=path) from error


def check_fusions(plan: Plan, path: str, device: str) -> None:
    """Raises UnknownFusion (GA703), and BadPin (GA202) for ops that no plan like this can place.

    device: a device type.
    """
    names = enabled(plan.fusions, device)
    names = without_tensor_axis(names) if plan.tensor > 1 else names
    if names != plan.fusions:
        reason = f"of these, a plan with tensor={plan.tensor} places: {', '.join(names) or 'none'}"
        raise BadPin(pin="fusions", value=plan.fusions, reason=reason, plan=path)


def pins_of(plan: Plan) -> dict[str, Any]:
    """The pins that ask for this plan. Raises BadPin (GA202) for a precision without a name."""
    pins = {name: value for name, value in plan.decisions.items() if name not in _NO_PIN}
    named = {precision: name for name, precision in PRECISIONS.items()}
    precision = pins["precision"]
    if precision not in named:
        known = tuple(PRECISIONS)
        raise BadPin(pin="precision", value=precision, reason="it has no name", allowed=known)
    pins["precision"] = named[precision]
    pins["placements"] = dict(pins["placements"])
    pins["loss_chunk"] = plan.loss_chunk or None  # the op's own default
    pins["shard_size"] = plan.shard_size or None  # all of data
    pins["context_by"] = plan.context_by or None  # chosen call by call
    if plan.tensor == 1:
        del pins["sequence"]
    return pins


def _check_counts(plan: Plan) -> None:
    if plan.compile not in COMPILERS:  # a plan does not leave it open, as a pin does
        raise BadPin(pin="compile", value=plan.compile, reason="unknown", allowed=COMPILERS)
    for name in ("devices", "batch"):
        if getattr(plan, name) < 1:
            reason = "it is a count of at least 1"
            raise BadPin(pin=name, value=getattr(plan, name), reason=reason)
    if plan.shard_size == plan.data:
        reason = f"a plan says 0 for all of data={plan.data}"
        raise BadPin(pin="shard_size", value=plan.shard_size, reason=reason, allowed=("0",))


def _check_rates(plan: Plan) -> None:
    """Check that the rates are those of the axes that shard the graph, or none."""
    if not plan.rates:
        return
    axes = [axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1]
    known = [f.name for f in fields(Rates)]
    described = [axis for axis, _ in plan.rates]
    for _, rates in plan.rates:
        if (
            described != axes
            or len(rates) != len(known)
            or not all(0 <= r < math.inf for r in rates)
        ):
            reason = f"it has {', '.join(known)} of each of: {', '.join(axes) or 'no axis'}"
            raise BadPin(pin="rates", value=plan.rates, reason=reason)


def _check_selective(plan: Plan, step: StepGraph) -> None:
    """Check that the blocks and values exist, each block once."""
    if not plan.selective:
        return
    known = block_values(step.graph.graph.nodes, step.positions)
    seen = set(plan.recompute)
    for own in plan.selective:
        for block in own.blocks:
            reason = ""
            if block not in known:
                reason = f"{block} is no block; blocks: {', '.join(known) or 'none'}"
            elif block in seen:
                reason = f"{block} is said twice"
            elif unknown := [label for label in own.saved if label not in known[block]]:
                reason = f"{block} has no value {unknown[0]!r}; it has {', '.join(known[block])}"
            elif not own.saved:
                reason = f"nothing of {block} is saved: it belongs to recompute"
            if reason:
                raise BadPin(pin="selective", value=own, reason=reason)
            seen.add(block)


def _is(value: object, hint: Any) -> bool:
    """Whether a value has a type as `Plan` declares it. Whole numbers count as float; a bool is no
    number."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is(value, arg) for arg in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if args[-1] is Ellipsis:
            return all(_is(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(_is, value, args))
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    if not isinstance(value, hint):
        return False
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return all(_is(getattr(value, f.name), hints[f.name]) for f in fields(hint))
    return True
