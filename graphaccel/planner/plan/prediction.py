"""What a plan predicts: seconds by cause, bytes by rank and category, and the plans that lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from graphaccel.ir.program import OrtDeclined, OrtRegion, OrtReport


@dataclass(frozen=True)
class Phases:
    """The peak bytes of tensors on a rank in each phase of a training.

    load: while this rank's parameters are initialised from a model without weights; load_built:
    from one that was built with them. forward, backward: of the first step, which has no optimizer
    state yet. step: during the optimizer's step. later: forward and backward of the later steps.
    save: while each rank saves its shards; save_whole: in `full_state_dict`. host_load,
    host_load_built, host_save_whole: the same in bytes of host memory, where the device is not the
    host.
    """

    load: int
    load_built: int
    forward: int
    backward: int
    step: int
    later: int
    save: int
    save_whole: int
    host_load: int = 0
    host_load_built: int = 0
    host_save_whole: int = 0


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak tensor bytes on one rank of a stage, by PyTorch's categories, and where the
    peak occurs. host: the most bytes that the plan keeps on the host for this rank, not part of the
    peak. chosen: by how much an uneven choice of experts raises the peak (`Prediction.chosen`).
    uneven: by how much the peak is higher on a device whose experts are chosen by
    `planner.memory.exact_memory.UNEVEN` times their even share of rows. phases: only of a plan
    whose programs were built."""

    rank: int
    parameter: int
    gradient: int
    optimizer: int
    activation: int
    temporary: int
    other: int
    peak: int
    at: str
    host: int = 0
    chosen: int = 0
    uneven: int = 0
    phases: Phases | None = None

    @property
    def tensors(self) -> int:
        """Bytes in tensors: the peak without context and allocator reserve."""
        return self.peak - self.other

    @property
    def parts(self) -> dict[str, int]:
        """Bytes at the peak by PyTorch's category; their sum is the peak."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("rank", "peak", "at", "host", "chosen", "uneven", "phases")
        }


@dataclass(frozen=True)
class Chosen:
    """The experts that the example batch's rows choose in a block. shares: [data][expert], the rows
    that choose the experts of a device there, divided by an even share; of the microbatch with
    most."""

    block: str
    shares: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Prediction:
    """Seconds per step by cause; memory per pipeline rank; what ONNX Runtime runs.

    offload: seconds of copies between device and host that no computation hides. chosen: the choice
    of experts for which memory is predicted, on the fullest device; without it, and for seconds,
    every expert is assumed to be chosen equally often.
    """

    seconds: float
    compute: float
    communication: float
    bubble: float
    optimizer: float
    memory: tuple[StageMemory, ...] = ()
    ort: OrtReport | None = None
    offload: float = 0.0
    chosen: tuple[Chosen, ...] = ()

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by cause; their sum is the step."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("seconds", "memory", "ort", "chosen")
            and (f.name != "offload" or self.offload)
        }


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen: its name, seconds, peak bytes, and why it lost."""

    name: str
    seconds: float
    peak: int
    reason: str


def prediction_of(data: Mapping[str, Any]) -> Prediction:
    """A prediction from the data of a plan's JSON."""
    plain = dict(data)
    memory = tuple(_stage_memory(**m) for m in plain.pop("memory"))
    ort = _ort_report(plain.pop("ort", None))
    chosen = tuple(
        Chosen(block["block"], tuple(map(tuple, block["shares"])))
        for block in plain.pop("chosen", ())
    )
    return Prediction(**plain, memory=memory, ort=ort, chosen=chosen)


def _stage_memory(phases: dict[str, int] | None = None, **data: Any) -> StageMemory:
    return StageMemory(**data, phases=None if phases is None else Phases(**phases))


def _ort_report(data: dict[str, Any] | None) -> OrtReport | None:
    if data is None:
        return None
    regions = tuple(OrtRegion(**r) for r in data.pop("regions"))
    declined = tuple(OrtDeclined(**d) for d in data.pop("declined"))
    return OrtReport(**data, regions=regions, declined=declined)
