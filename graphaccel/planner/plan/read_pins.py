"""Reads and checks the user's pins, and returns them as `Pins`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.axis_orders import read_order
from graphaccel.planner.plan.check_pins import (
    axis_sizes,
    check_batch,
    check_loss,
    check_mesh,
    check_together,
)
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.module_pins import (
    read_placements,
    read_stages,
    vocabulary_placements,
)
from graphaccel.planner.plan.offload import read_offload
from graphaccel.planner.plan.pins import NAMES, PINS, Pin, Pins


def read_pins(
    pins: Mapping[str, object], step: StepGraph, devices: int, batch: int, limits: Limits
) -> Pins:
    """Check the pins, one by one and against each other.

    A pin whose value is None counts as left out.

    Raises: BadPin (GA202), NoLoss (GA103), BatchNotDivisible (GA206), SplitRefused (GA207).
    """
    given = _values(pins)
    typed: dict[str, Any] = {**given, **_names(given, step)}
    if "placements" in given:
        typed["placements"] = read_placements(given["placements"], step)
    if "stage_of" in given:
        typed["stage_of"] = read_stages(given["stage_of"], step)
    if "offload" in given:
        typed["offload"] = read_offload(given["offload"])
    result = _ordered(Pins(**typed))
    check_loss(result, step)
    check_mesh(result, devices)
    if result.vocab is not None:
        sizes = axis_sizes(result, devices)
        sizes["data"] = result.shard_size or sizes["data"]
        placed = vocabulary_placements(result.vocab, step, sizes)
        own = {**placed, **dict(result.placements or ())}
        result = replace(result, placements=tuple(sorted(own.items())))
    check_together(result, devices, step.has_loss)
    check_batch(result, batch, limits)
    return result


def check_alone(pins: Mapping[str, object], devices: int, batch: int) -> None:
    """The checks of `read_pins` that need no graph."""
    graph = ("recompute", "ort", "placements", "vocab", "stage_of", "fusions")
    given: dict[str, Any] = {n: v for n, v in _values(pins).items() if n not in graph}
    if "offload" in given:
        given["offload"] = read_offload(given["offload"])
    if "cuts" in given:
        given["cuts"] = _strings("cuts", given["cuts"])
    result = _ordered(Pins(**given))
    check_mesh(result, devices)
    check_together(result, devices, True)
    check_batch(result, batch, Limits())


def _values(pins: Mapping[str, object]) -> dict[str, object]:
    """The pins that are not left out, each checked by itself."""
    given = {name: value for name, value in pins.items() if value is not None}
    for name in given:
        if name not in NAMES:
            raise BadPin(pin=name, value=given[name], reason=f"known pins: {', '.join(NAMES)}")
    for name, value in given.items():
        _check_value(name, value, PINS[name])
    return given


def _check_value(name: str, value: object, pin: Pin) -> None:
    """Check one value against the kind of its pin. Raises BadPin (GA202)."""
    if pin.kind in ("count", "bytes"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadPin(pin=name, value=value, reason="it is a count of at least 1")
    elif pin.kind == "choice" and value not in pin.choices:
        raise BadPin(pin=name, value=value, reason="unknown", allowed=pin.choices)
    elif pin.kind == "level" and (isinstance(value, bool) or value not in pin.choices):
        allowed = tuple(map(str, pin.choices))
        raise BadPin(pin=name, value=value, reason="it is a level of ZeRO", allowed=allowed)
    elif pin.kind == "switch" and not isinstance(value, bool):
        reason = "it is true or false"
        raise BadPin(pin=name, value=value, reason=reason, allowed=("True", "False"))


def _names(given: Mapping[str, object], step: StepGraph) -> dict[str, object]:
    """The pins recompute, ort and cuts, checked."""
    results: dict[str, object] = {}
    value = given.get("recompute")
    blocks = tuple(block.name for block in step.blocks)
    if isinstance(value, str) and value not in PINS["recompute"].choices:
        raise BadPin(
            pin="recompute", value=value, reason="unknown", allowed=PINS["recompute"].choices
        )
    if value is not None and not isinstance(value, str):
        chosen = _strings("recompute", value)
        for name in chosen:
            if name not in blocks:
                raise BadPin(
                    pin="recompute",
                    value=chosen,
                    reason=f"{name} is no block; blocks: {', '.join(blocks) or 'none'}",
                    allowed=PINS["recompute"].choices,
                )
        results["recompute"] = tuple(name for name in blocks if name in chosen)
    if "ort" in given:
        results["ort"] = _ort(given["ort"], step)
    if "cuts" in given:
        order = step.positions
        cuts = _strings("cuts", given["cuts"])
        for name in cuts:
            if name not in order:
                raise BadPin(pin="cuts", value=cuts, reason=f"no node is called {name}")
        places = [order[name] for name in cuts]
        if places != sorted(set(places)):
            raise BadPin(pin="cuts", value=cuts, reason="they are not in the order of the graph")
        results["cuts"] = cuts
    return results


def _ort(value: object, step: StepGraph) -> str | tuple[str, ...]:
    """The pin ort: one of its words, or paths of modules that compute something."""
    if isinstance(value, str):
        if value not in PINS["ort"].choices:
            raise BadPin(pin="ort", value=value, reason="unknown", allowed=PINS["ort"].choices)
        return value
    paths = _strings("ort", value)
    modules = {n.meta.get("module", "") for n in step.graph.graph.nodes}
    for path in paths:
        if not any(m == path or m.startswith(f"{path}.") for m in modules):
            raise BadPin(
                pin="ort",
                value=paths,
                reason=f"no op belongs to {path}",
                allowed=PINS["ort"].choices,
            )
    return paths


def _strings(pin: str, value: object) -> tuple[str, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    raise BadPin(pin=pin, value=value, reason="it is a list of names")


def _ordered(pins: Pins) -> Pins:
    """The pins with all axes in their order; an axis that the pinned order leaves out has one
    device."""
    if pins.order is None:
        return pins
    order = read_order(pins.order, {axis: getattr(pins, axis) for axis in AXES})
    left = {axis: 1 for axis in AXES if axis not in pins.order}
    return replace(pins, order=order, **left)
