"""`Plan`: everything that was decided about a step, as plain data; JSON on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Precision:
    """Dtype per role, as torch dtype names. `scaled`: dynamic loss scaling (fp16)."""

    compute: str = "float32"
    parameter: str = "float32"
    reduce: str = "float32"
    scaled: bool = False


@dataclass(frozen=True)
class StageMemory:
    """Predicted peak tensor bytes on one rank of a stage, by PyTorch's categories, and where the
    peak is."""

    rank: int
    parameter: int
    gradient: int
    optimizer: int
    activation: int
    temporary: int
    other: int
    peak: int
    at: str

    @property
    def tensors(self) -> int:
        """Bytes in tensors: the peak without context and allocator reserve."""
        return self.peak - self.other


@dataclass(frozen=True)
class Prediction:
    """Seconds per step and where they go; memory per pipeline rank."""

    seconds: float
    compute: float
    communication: float
    bubble: float
    optimizer: float
    memory: tuple[StageMemory, ...] = ()


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen: what it was, how long, how big, and why it lost."""

    name: str
    seconds: float
    peak: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The decisions, the predictions, and what they were made for.

    Mesh axes: data x pipeline = devices. `interleave` stages lie on each pipeline rank; stage k is
    on pipeline rank k % pipeline. cuts: names of the forward-graph nodes after which a stage ends.
    recompute: names of the blocks that are computed again in the backward pass.
    bucket_bytes: size at which a bucket of gradients is sent for all-reduce.
    outputs: "loss" or "all": what a training step hands out besides the loss.
    pinned: decisions the user made. graph, cluster: fingerprints of what was planned for.
    """

    devices: int
    data: int = 1
    pipeline: int = 1
    interleave: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    cuts: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    bucket_bytes: int = 25 << 20
    outputs: str = "loss"
    batch: int = 1
    pinned: tuple[str, ...] = ()
    graph: str = ""
    cluster: str = ""
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    certificate: str = ""
    schema: int = SCHEMA

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pipeline * self.interleave

    @property
    def name(self) -> str:
        """`data 2 x pipeline 2 · 8 microbatches · recompute 4 blocks`."""
        parts = [f"data {self.data} x pipeline {self.pipeline}"]
        if self.interleave > 1:
            parts[0] += f" x interleave {self.interleave}"
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} microbatches of {self.microbatch_size}")
        if self.recompute:
            parts.append(f"recompute {len(self.recompute)} blocks")
        if self.precision.compute != "float32":
            parts.append(self.precision.compute)
        return " · ".join(parts)

    @property
    def microbatch_size(self) -> int:
        """Examples in one microbatch on one data rank."""
        return self.batch // (self.data * self.microbatches)

    def to_json(self) -> str:
        """Stable JSON: sorted keys, bytes as integers, seconds as floats."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan back. Raises ValueError for another schema or unknown fields."""
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"plan schema {data.get('schema')!r}; this version reads {SCHEMA}")
        unknown = set(data) - {f.name for f in fields(Plan)}
        if unknown:
            raise ValueError(f"unknown fields in plan: {', '.join(sorted(unknown))}")
        prediction = data.pop("prediction")
        if prediction is not None:
            memory = tuple(StageMemory(**m) for m in prediction.pop("memory"))
            prediction = Prediction(**prediction, memory=memory)
        return Plan(
            **{
                k: tuple(v) if isinstance(v, list) and k != "alternatives" else v
                for k, v in data.items()
                if k not in ("precision", "alternatives")
            },
            precision=Precision(**data["precision"]),
            alternatives=tuple(Alternative(**a) for a in data["alternatives"]),
            prediction=prediction,
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    def decided(self, **changes: Any) -> Plan:
        """The same plan with some decisions changed and the predictions dropped."""
        return replace(self, prediction=None, alternatives=(), certificate="", **changes)
