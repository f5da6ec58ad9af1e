"""Conflicting pins: a minimal set that conflicts, and the values that would resolve it.

A set of pins conflicts if no plan can satisfy it, whatever its memory. Dropping the pins one by
one, and leaving a pin out whenever the rest still conflicts, gives a set of which every member is
needed: a minimal (irreducible) conflicting set, found with as many checks as there are pins
(deletion filter: Chinneck and Dravnieks, "Locating minimal infeasible constraint sets in linear
programs", ORSA Journal on Computing 3, 1991).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, ConflictingPins, GraphAccelError
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.pins import PINS, Pins, divisors
from graphaccel.planner.plan.read_pins import read_pins

Check = Callable[[Mapping[str, object]], GraphAccelError | None]
_OFFERED = ("schedule", "zero", "reshard_after_forward", "accumulation", "offload")
"""Pins whose choices are tried as replacements when they conflict with others."""
_NEVER_CHOSEN = ("precision",)
"""Pins that the search does not choose: if left out, the plan has their default, which may itself
conflict with another pin. So dropping them does not show whether the rest is feasible."""


def agreeing_pins(
    pins: Mapping[str, object], step: StepGraph, devices: int, batch: int, limits: Limits
) -> Pins:
    """`read_pins`; where several pins conflict, the error names a minimal conflicting set.

    Pins in `_NEVER_CHOSEN` are not part of that set and stay fixed while the others are dropped.
    Raises: as `read_pins`, and ConflictingPins (GA210).
    """
    given = {name: value for name, value in pins.items() if value is not None}
    standing = {name: given[name] for name in _NEVER_CHOSEN if name in given}

    def check(some: Mapping[str, object]) -> GraphAccelError | None:
        try:
            read_pins({**standing, **some}, step, devices, batch, limits)
        except BadPin as error:
            return error
        return None

    try:
        return read_pins(given, step, devices, batch, limits)
    except BadPin:
        free = {name: value for name, value in given.items() if name not in standing}
        names = conflict(free, check)
        core = {name: given[name] for name in names}
        problem = check(core)
        assert isinstance(problem, BadPin)
        if len(names) < 2:
            raise problem from None
        results = {name: tuple(_instead(core, name, devices, batch, check)) for name in names}
        raise ConflictingPins(
            pins=core, devices=devices, reason=problem.reason, instead=results
        ) from None


def conflict(pins: Mapping[str, object], check: Check) -> tuple[str, ...]:
    """The names of a minimal subset of `pins` that `check` still refuses.

    check: returns an error for a set of pins that is not possible. It refuses `pins` as a whole.
    """
    kept = dict(pins)
    for name in pins:
        rest = {other: value for other, value in kept.items() if other != name}
        if check(rest) is not None:
            kept = rest
    return tuple(kept)


def _instead(
    core: Mapping[str, object], name: str, devices: int, batch: int, check: Check
) -> Iterator[object]:
    """The values of one pin with which the other pins could stay as they are."""
    for value in _values(name, devices, batch):
        if value != core[name] and check({**core, name: value}) is None:
            yield value


def _values(name: str, devices: int, batch: int) -> tuple[object, ...]:
    if name in (*AXES, "shard_size"):
        return divisors(devices)
    if name in ("microbatches", "interleave"):
        return divisors(batch) if name == "microbatches" else (1, 2, 4)
    pin = PINS[name]
    if pin.kind == "switch":
        return (True, False)
    return pin.choices if name in _OFFERED else ()
