"""What a rank holds throughout a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from graphaccel.planner.memory.graph_columns import Share
from graphaccel.planner.memory.liveness import Liveness


def _nothing(_: Sequence[str]) -> int:
    return 0


@dataclass(frozen=True)
class Resident:
    """Bytes that a rank holds throughout. parameters, buffers: by name, as this rank holds them.
    batch: the global batch.

    states: trained parameter → bytes of its part whose optimizer state this rank holds.
    optimizer_bytes: per byte of `states` (2.0 for AdamW in the parameter's dtype). offload: of the
    plan. exchanged: of the transport (`planner.memory.graph_columns.Rows`); the device is then the
    host. kernels: Inductor makes kernels of the graphs; what lives within one takes no memory.
    whole: parameter → its bytes in full; built: bytes of all parameters in full and of buffers.
    step: temporary bytes of the optimizer's step, for the parameters of a rank's stages
    (`planner.estimate.optimizer_memory`).
    """

    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    states: Mapping[str, int]
    batch: int
    optimizer_bytes: float
    offload: tuple[str, ...] = ()
    exchanged: bool = False
    kernels: bool = False
    whole: Mapping[str, int] = field(default_factory=dict)
    built: int = 0
    step: Callable[[Sequence[str]], int] = _nothing

    def counted(self, chosen: Share, pieces: int = 0) -> Liveness:
        """What counts the bytes of a step. chosen, pieces: see `Liveness`."""
        return Liveness(
            pieces=pieces, chosen=chosen, exchanged=self.exchanged, kernels=self.kernels
        )
