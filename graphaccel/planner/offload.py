"""What may rest on the host: the pin, its bytes there and its seconds."""

from __future__ import annotations

from collections.abc import Sequence

from graphaccel.errors import BadPin

KINDS = ("optimizer",)
"""What can be offloaded, the cheapest for its bytes first."""
CHOICES = ("none", *KINDS)
"""The values of the pin."""


def read_offload(value: object) -> tuple[str, ...]:
    """What a pin asks for, in the order of `KINDS`: "none", a kind, several joined by "+" or in a
    list.

    Raises: BadPin (GA202).
    """
    names: object = value.split("+") if isinstance(value, str) else value
    if names == ["none"]:
        return ()
    if not isinstance(names, Sequence) or any(name not in KINDS for name in names):
        raise BadPin(pin="offload", value=value, reason="unknown", allowed=CHOICES)
    return tuple(kind for kind in KINDS if kind in names)


def offload_text(offload: Sequence[str]) -> str:
    """A plan's offload as the pin says it."""
    return "+".join(offload) or "none"


def placed_optimizer(state: int, trained: int, offload: Sequence[str]) -> tuple[int, int]:
    """Bytes of optimizer state on the device and on the host.

    state: its bytes on this rank; trained: those of the parameters it is of. On the host it has
    their copies and their gradients beside it (`runtime.host`).
    """
    return (0, state + 2 * trained) if "optimizer" in offload else (state, 0)
