"""Whether a training step fits, the fewest devices it fits on, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphaccel.capture.batch import Batch
from graphaccel.compiler.compiler import Compiler
from graphaccel.errors import BatchNotDivisible, InfeasiblePlan
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan

_DOUBLINGS = 24


@dataclass(frozen=True)
class Fit:
    """Whether the fastest safe plan, or what comes closest to one, fits the fullest device.

    plan: None where no plan is safe, and then `reason` says which came closest and what would help.
    verdict: "safe" (also where the allocator wastes as much as it is assumed to), "likely" (where
    it wastes half of that), "risky" (tensors leave hardly any room) or "impossible". low, expected,
    high: bytes that a device needs where the allocator wastes nothing, half, and all of what it is
    assumed to. available: bytes that the device has.
    """

    plan: Plan | None
    verdict: str
    low: int
    expected: int
    high: int
    available: int
    reason: str = ""

    def __bool__(self) -> bool:
        return self.plan is not None


def fit_of(compiler: Compiler, batch: Batch) -> Fit:
    """The fit of a batch. Raises what `Compiler.choose` raises, except InfeasiblePlan."""
    cluster, reason = compiler.cluster, ""
    plan: Plan | None = None
    try:
        plan = compiler.choose(batch).plan
        assert plan.prediction is not None
        tensors = max(m.tensors for m in plan.prediction.memory)
    except InfeasiblePlan as error:
        reason, tensors = str(error), error.peak - error.breakdown.get("other", 0)
    low, expected, high = (
        int(cluster.context_bytes + tensors * (1 + share * cluster.fragmentation))
        for share in (0.0, 0.5, 1.0)
    )
    memory = cluster.device.memory
    return Fit(plan, cluster.verdict(tensors), low, expected, high, memory, reason)


def fewest_devices(
    compiler: Compiler, batch: Batch, most: int, cluster: Callable[[int], Cluster]
) -> int | None:
    """The fewest devices, by powers of two up to `most`, on which a plan is safe; None for none.

    cluster: the hardware with so many devices.
    """
    count = 1
    while count <= most:
        if _plan(compiler.on(cluster(count)), batch) is not None:
            return count
        count *= 2
    return None


def largest_batch(compiler: Compiler, batch: Batch) -> int | None:
    """The largest global batch with a safe plan, a multiple of the number of devices and within
    1/16 of the first multiple that has none; None where one row for each device is too many.

    Without pinned microbatches there is one, or a larger batch would be cut into more of them.
    """
    pins = dict(compiler.pins)
    if pins.get("microbatches") is None:
        pins["microbatches"] = 1
    compiler = compiler.with_pins(pins)
    unit = compiler.cluster.count * int(pins["microbatches"])

    def fits(parts: int) -> bool:
        return _plan(compiler, compiler.of_size(batch, parts * unit)) is not None

    good, bad = 0, 1
    for _ in range(_DOUBLINGS):
        if not fits(bad):
            break
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good * unit or None


def _plan(compiler: Compiler, batch: Batch) -> Plan | None:
    try:
        return compiler.choose(batch).plan
    except (InfeasiblePlan, BatchNotDivisible):
        return None
