"""What may be kept on the host of a problem: as pinned, or as far as memory asks for it."""

from __future__ import annotations

from graphaccel.errors import BadPin
from graphaccel.planner.offload import offload_text
from graphaccel.planner.pins import Pins
from graphaccel.planner.solve import Problem


def offered(pins: Pins, problem: Problem) -> tuple[tuple[str, ...], ...]:
    """What is tried one after another until something fits: nothing first. () alone where `offload`
    is pinned, or where the host is not known or the optimizer may need more than its step."""
    if pins.offload is not None or problem.cluster.host is None:
        return ((),)
    if not problem.optimizer_bytes or not problem.shardable:
        return ((),)
    return ((), ("optimizer",))


def check_offload(pins: Pins, problem: Problem) -> None:
    """Raises BadPin (GA202) where what is pinned to the host is not there, or the host is not."""
    if not pins.offload:
        return
    reason = None
    if problem.cluster.host is None:
        reason = "the description of the cluster has no host, with its memory and links"
    elif "optimizer" in pins.offload and not problem.optimizer_bytes:
        reason = "there is no optimizer state"
    if reason is not None:
        said = offload_text(pins.offload)
        raise BadPin(pin="offload", value=said, reason=reason, allowed=("none",))
