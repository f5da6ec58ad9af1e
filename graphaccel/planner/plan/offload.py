"""Offloading to the host: the pin, the bytes that move there, and the time of the host's step."""

from __future__ import annotations

from collections.abc import Sequence

from graphaccel.errors import BadPin
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.pins import OFFLOADS
from graphaccel.planner.plan.prediction import StageMemory

KINDS = ("optimizer", "parameters", "activations")
"""What can be offloaded, in the order in which reports name it."""
STAYING = tuple(choice for choice in OFFLOADS if "parameters" not in choice)
"""The values of the pin that keep parameters on the device."""
LEAVING = tuple(choice for choice in OFFLOADS if "parameters" in choice)
"""The values of the pin that offload parameters to the host."""
LARGE = 2**20
"""The size in bytes from which an activation is worth offloading."""


def read_offload(value: object) -> tuple[str, ...]:
    """What a pin offloads, in the order of `KINDS`. value: "none", a kind, or several kinds joined
    by "+" or in a list.

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
    """A plan's offload in the notation of the pin."""
    return "+".join(offload) or "none"


def placed_optimizer(state: int, trained: int, offload: Sequence[str]) -> tuple[int, int]:
    """Bytes of optimizer state on the device and on the host.

    state: bytes of optimizer state on this rank; trained: bytes of the parameters that it belongs
    to. If offloaded, the host also holds these parameters, or copies of them, and their gradients
    (`runtime.parameters.host`).
    """
    return (0, state + 2 * trained) if "optimizer" in offload else (state, 0)


def placed_parameters(held_bytes: int, trained: int, offload: Sequence[str]) -> tuple[int, int]:
    """Bytes of parameters held on the device and on the host.

    held_bytes: bytes of all parameters on this rank; trained: bytes of the trained ones among them,
    which `placed_optimizer` already counts on the host.
    """
    return (0, held_bytes - trained) if "parameters" in offload else (held_bytes, 0)


def device_state(optimizer_bytes: int, offload: Sequence[str]) -> int:
    """Bytes of optimizer state on the device for each trained number."""
    return 0 if "optimizer" in offload else optimizer_bytes


def hosts(cluster: Cluster) -> int:
    """Bytes of host memory per device; 0 where the host is not known."""
    return 0 if cluster.host is None else cluster.host.memory


def host_excess(memory: Sequence[StageMemory], cluster: Cluster) -> int:
    """Bytes by which the host memory of the fullest rank exceeds what there is; below 0 it fits, or
    nothing is offloaded. If the device is the host's own processor, the device's bytes are counted
    there too."""
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

    gradient: bytes of gradients on this rank, in `tensors` tensors. optimizer_bytes: bytes of
    optimizer state for each trained number. device_seconds: seconds of the same step on the device.

    Parameters and gradients are copied to the host and parameters back, one after another: three
    times their bytes over the link, or gradients alone where parameters are offloaded too. The step
    reads parameter, gradient and state and writes parameter and state at the bandwidth of the
    host's memory; it is assumed to be no faster than the device's step. So offloading never makes a
    plan faster.
    """
    assert cluster.host is not None
    copies = (1 if "parameters" in offload else 3) * gradient / cluster.host.link
    traffic = gradient * (3 + 2 * optimizer_bytes / 4)
    step = traffic / cluster.host.memory_bandwidth + tensors * cluster.device.launch_seconds
    return max(step, device_seconds), copies
