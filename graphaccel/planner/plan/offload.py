"""What may rest on the host: the pin, its bytes there and its seconds."""

from __future__ import annotations

from collections.abc import Sequence

from graphaccel.errors import BadPin
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.pins import OFFLOADS
from graphaccel.planner.plan.plan import StageMemory

KINDS = ("optimizer", "parameters", "activations")
"""What can be offloaded, in the order in which it is said."""
STAYING = tuple(choice for choice in OFFLOADS if "parameters" not in choice)
"""The values of the pin with which parameters rest on the device."""
LEAVING = tuple(choice for choice in OFFLOADS if "parameters" in choice)
"""Those with which they rest on the host."""
LARGE = 2**20
"""Bytes from which on an activation is worth a copy."""


def read_offload(value: object) -> tuple[str, ...]:
    """What a pin asks for, in the order of `KINDS`: "none", a kind, several joined by "+" or in a
    list.

    Raises: BadPin (GA202).
    """
    names: object = value.split("+") if isinstance(value, str) else value
    if names == ["none"]:
        return ()
    if not isinstance(names, Sequence) or any(name not in KINDS for name in names):
        raise BadPin(pin="offload", value=value, reason="unknown", allowed=OFFLOADS)
    if "parameters" in names and "optimizer" not in names:
        reason = "parameters on the host are stepped there, with their optimizer state"
        raise BadPin(pin="offload", value=value, reason=reason, allowed=LEAVING)
    return tuple(kind for kind in KINDS if kind in names)


def offload_text(offload: Sequence[str]) -> str:
    """A plan's offload as the pin says it."""
    return "+".join(offload) or "none"


def placed_optimizer(state: int, trained: int, offload: Sequence[str]) -> tuple[int, int]:
    """Bytes of optimizer state on the device and on the host.

    state: its bytes on this rank; trained: those of the parameters it is of. On the host it has
    them, or copies of them, and their gradients beside it (`runtime.parameters.host`).
    """
    return (0, state + 2 * trained) if "optimizer" in offload else (state, 0)


def placed_parameters(resting: int, trained: int, offload: Sequence[str]) -> tuple[int, int]:
    """Bytes of parameters that rest on the device and on the host.

    resting: of all on this rank; trained: of those among them that are trained, which
    `placed_optimizer` has on the host already.
    """
    return (0, resting - trained) if "parameters" in offload else (resting, 0)


def device_state(optimizer_bytes: int, offload: Sequence[str]) -> int:
    """Bytes of optimizer state on the device for each trained number."""
    return 0 if "optimizer" in offload else optimizer_bytes


def hosts(cluster: Cluster) -> int:
    """Bytes of host memory of each device; 0 where nothing is known of it."""
    return 0 if cluster.host is None else cluster.host.memory


def host_excess(memory: Sequence[StageMemory], cluster: Cluster) -> int:
    """Bytes by which what the fullest rank keeps on the host misses it; below 0 it fits, or nothing
    is kept there. A device that is the host's own processor has its own bytes there too."""
    kept = [m for m in memory if m.host]
    if not kept or cluster.host is None:
        return -1
    own = 1 if cluster.host.shared else 0
    return max(m.host + own * m.peak for m in kept) - cluster.host.memory


def host_step_seconds(
    gradient: float,
    tensors: int,
    optimizer_bytes: int,
    cluster: Cluster,
    device_seconds: float,
    offload: Sequence[str] = ("optimizer",),
) -> tuple[float, float]:
    """(seconds of the optimizer's step on the host, seconds of the copies before and after it).

    gradient: bytes of gradients on this rank, of so many tensors. optimizer_bytes: for each trained
    number. device_seconds: of the same step on the device.

    Parameters and gradients go down and parameters up, one after another: three times their bytes
    over the link; gradients alone where parameters rest on the host too. The step reads parameter,
    gradient and state and writes parameter and state at the bandwidth of the host's memory; it is
    not taken to be faster than the device's. So a plan is never faster for its offload.
    """
    assert cluster.host is not None
    copies = (1 if "parameters" in offload else 3) * gradient / cluster.host.link
    traffic = gradient * (3 + 2 * optimizer_bytes / 4)
    step = traffic / cluster.host.memory_bandwidth + tensors * cluster.device.launch_seconds
    return max(step, device_seconds), copies
