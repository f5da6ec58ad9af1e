"""Explains why batch, devices and pins leave no candidate, and finds nearby values that would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from graphaccel.errors import BadPin, BatchNotDivisible
from graphaccel.planner.plan.offload import STAYING, offload_text
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.solve import Problem

_LONG = 0.25  # of a step is spent in the pipeline's bubble


def no_shape(problem: Problem, pins: Pins, batch: int) -> Exception:
    """The error that says why there is no candidate at all."""
    count = problem.cluster.count // pins.model_parallel_size
    if problem.limits.data and pins.pipeline in (None, 1):
        return problem.limits.data.refused("data")
    data = pins.data or count // (pins.pipeline or 1)
    if "parameters" in pins.on_host and data > 1:
        reason = None
        if pins.zero == 0:
            reason = "zero=0 keeps them whole"
        elif not problem.profile.step.has_loss:
            reason = "with a loss outside of the graph nothing is sharded"
        elif not problem.shardable:
            reason = "the optimizer is not known to step shards"
        if reason is not None:
            reason = f"over data, parameters on the host rest in shards, and {reason}"
            said = offload_text(pins.on_host)
            return BadPin(pin="offload", value=said, reason=reason, allowed=STAYING)
    return BatchNotDivisible(
        batch=batch, microbatches=pins.microbatches or 1, data=data, allowed=()
    )


def indivisible(count: int, batch: int, stages: int) -> BatchNotDivisible:
    """The error where the devices that no data axis takes are too many for a pipeline, with the
    nearest device counts and batch sizes that would work."""

    def possible(devices: int, size: int) -> bool:
        return devices // math.gcd(devices, size) <= stages

    devices = islice((n for n in _near(count, 2 * count) if possible(n, batch)), 3)
    most = 2 * batch + count
    batches = islice((n for n in _near(batch, most) if possible(count, n)), 3)
    return BatchNotDivisible(
        batch=batch,
        microbatches=1,
        data=count,
        allowed=(),
        devices=tuple(sorted(devices)),
        batches=tuple(sorted(batches)),
        widest=math.gcd(count, batch),
        stages=stages,
    )


def uneven_note(plan: Plan, pins: Pins) -> str:
    """Numbers of devices and of examples that divide each other, where a plan waits long for its
    pipeline because those asked for do not; "" otherwise."""
    prediction, count, batch = plan.prediction, plan.devices, plan.batch
    assert prediction is not None
    if (
        pins.data
        or pins.pipeline
        or batch % count == 0
        or prediction.bubble < _LONG * prediction.seconds
    ):
        return ""
    fewer, more = max(n for n in range(1, count) if batch % n == 0), -(-batch // count) * count
    return (
        f"the bubble is {prediction.bubble / prediction.seconds:.0%} of the step, as {count} "
        f"devices can not share a batch of {batch}: {fewer} "
        f"{'device' if fewer == 1 else 'devices'} could, or they a batch of {more}"
    )


def _near(value: int, most: int) -> Iterator[int]:
    """Whole numbers from 1 to `most`, by their distance from `value`, the lower of two first."""
    for far in range(max(value, most - value + 1)):
        if value - far >= 1:
            yield value - far
        if 0 < far <= most - value:
            yield value + far
