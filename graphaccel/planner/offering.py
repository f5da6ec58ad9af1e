"""What may be kept on the host of a problem: as pinned, or as far as memory asks for it."""

from __future__ import annotations

from graphaccel.errors import BadPin
from graphaccel.planner.offload import KINDS, offload_text
from graphaccel.planner.pins import Pins
from graphaccel.planner.solve import Problem


def offered(pins: Pins, problem: Problem) -> tuple[tuple[str, ...], ...]:
    """What is tried one after another until something fits: nothing first, and of the rest what
    copies least. () alone where `offload` is pinned or the host is not known. Optimizers that may
    need more than a step on the host have to be asked for."""
    if pins.offload is not None or problem.cluster.host is None:
        return ((),)
    state = bool(problem.optimizer_bytes) and problem.shardable
    saved = pins.schedule != "zero_bubble"
    some = (("optimizer",), state), (("activations",), saved), (KINDS, state and saved)
    return ((), *(kinds for kinds, possible in some if possible))


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
