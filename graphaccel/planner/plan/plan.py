"""`Plan`: everything that was decided about a training step, as plain data; saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graphaccel.ir.program import Sharded
from graphaccel.planner.plan.axis_order import AXES, PARTS, stride
from graphaccel.planner.plan.axis_placements import BlockPlacements, from_data, to_data
from graphaccel.planner.plan.prediction import Alternative, Prediction, prediction_of

SCHEMA = 2
_WORDS = {True: "always", False: "never", "step": "once_per_step"}
"""The words for the values of `reshard_after_forward` in schema 1."""
INTERLEAVES = (1, 2, 4)
"""Candidate values of `Plan.interleave` where it is not pinned."""


@dataclass(frozen=True)
class Precision:
    """Dtypes by role, as torch dtype names. compute: of matmuls. stream: of the values between
    them: float32, or the compute dtype, where parameters are cast before anything reads them.
    matmul: what a device rounds the inputs of a matmul to, where that is not compute ("tfloat32",
    or an 8-bit dtype). scaled: dynamic loss scaling (fp16)."""

    compute: str = "float32"
    stream: str = "float32"
    parameter: str = "float32"
    reduce: str = "float32"
    matmul: str = ""
    scaled: bool = False

    @property
    def planned_only(self) -> bool:
        """Whether it can be planned only: the runtime does not support it."""
        return self.matmul.startswith("float8")


@dataclass(frozen=True)
class Selective:
    """Blocks that are recomputed in the backward except for some values, which are saved.

    saved: the labels of these values in a block (`planner.profile.block_recompute.value_labels`).
    """

    blocks: tuple[str, ...]
    saved: tuple[str, ...]


_NO_DECISION = frozenset(
    "devices batch pinned graph cluster prediction alternatives notes certificate schema".split()
)  # what the plan was made for, and what is predicted or reported about it


@dataclass(frozen=True)
class Plan:
    """The decisions, the predictions, and what they were made for.

    Mesh axes: pipeline x data x expert x context x tensor = devices.
    order: the axes from the outermost, whose neighbours are furthest apart, to the innermost
      (`planner.plan.axis_order`).
    interleave: stages on each pipeline rank; stage k is on pipeline rank k % pipeline.
    cuts: names of the forward-graph nodes after which a stage ends.
    recompute: names of the blocks of which the backward recomputes everything.
    selective: blocks that the backward recomputes except for some values, and these values.
    bucket_bytes: size at which a bucket of gradients is sent for all-reduce.
    zero: what is sharded over the data axis: 1 optimizer state, 2 and gradients, 3 and parameters.
    shard_size: number of neighbouring devices of the data axis over which ZeRO shards; 0: all of
      them. The data axis replicates over the rest.
    reshard_after_forward: ZeRO 3 frees gathered parameters after the forward and gathers them again
      for the backward ("always"), keeps them for the microbatch's backward ("never"), or gathers
      them once a step and keeps them for all microbatches ("once_per_step").
    cast_once: without ZeRO 3, parameters are cast to the compute dtype once a step, and the casts
      are held for all microbatches.
    accumulation: "whole": gradients are reduced in the last microbatch; "shards": in every
      microbatch, so that this rank holds its shard only (zero 2 and 3).
    placements: parameter name → its placement, where the user pinned it.
    sequence: activations between tensor-parallel regions may be sharded along the sequence.
    context_by: "heads" or "sequence": what attention is sharded by on the context axis; "": the
      faster of both, for each call.
    scatter_sends: of a value that all tensor ranks hold, each sends its part to the next stage,
      which gathers it.
    rates: axis → the rates by which placements on it were chosen
      (`sharding.solve.conversions.Rates`).
    axis_placements: axis that shards the graph → the placement of every parameter and the strategy
      of every call, by block kind; empty until they are solved.
    fusions: names of the fused ops that are used where their patterns match.
    loss_chunk: tokens of a microbatch whose logits a fused head and loss holds at a time; 0: the
      op's own default.
    ort: what ONNX Runtime runs: "off", "all" (whatever it can), "auto" (what was measured to be
      faster), or module paths. fallback: "error", or "fx": torch runs what ONNX Runtime or
      Inductor fails to build or run.
    compile: what runs the graphs of stages: "off" (FX code) or "inductor". cuda_graphs: actions are
      recorded as CUDA graphs, and replayed.
    min_cut: calls are decomposed, and a min-cut decides value by value what a forward saves and
      what the backward recomputes (`passes.activations.choose_saved`).
    offload: what is on the host between its uses: "optimizer" (its state, and its step),
      "parameters" (copied to the device for each block that reads them), "activations" (large ones,
      until their backward).
    outputs: "loss" or "all": what a training step returns besides the loss.
    pinned: the names of the decisions that the user made. graph, cluster: fingerprints of what was
      planned for.
    """

    devices: int
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    order: tuple[str, ...] = AXES
    interleave: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    cuts: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    selective: tuple[Selective, ...] = ()
    precision: Precision = field(default_factory=Precision)
    bucket_bytes: int = 25 << 20
    fusions: tuple[str, ...] = ()
    loss_chunk: int = 0
    ort: str | tuple[str, ...] = "auto"
    fallback: str = "error"
    compile: str = "off"
    cuda_graphs: bool = False
    min_cut: bool = False
    offload: tuple[str, ...] = ()
    outputs: str = "loss"
    zero: int = 0
    shard_size: int = 0
    reshard_after_forward: str = "always"
    cast_once: bool = False
    accumulation: str = "whole"
    placements: tuple[tuple[str, tuple[Sharded, ...]], ...] = ()
    sequence: bool = True
    context_by: str = ""
    scatter_sends: bool = False
    rates: tuple[tuple[str, tuple[float, ...]], ...] = ()
    axis_placements: tuple[tuple[str, tuple[BlockPlacements, ...]], ...] = ()
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
    def mesh(self) -> dict[str, int]:
        """Axis → number of devices on it; they multiply to `devices`."""
        inner = {axis: getattr(self, axis) for axis in ("expert", "context", "tensor")}
        inner = {axis: size for axis, size in inner.items() if size > 1}
        return {"data": self.data, **inner, "pipeline": self.pipeline}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis → number of devices on it, outermost first; "replicate" and "shard" replace data
        where ZeRO shards over a part of it."""
        results: dict[str, int] = {}
        for axis in self.order:
            if axis == "data" and self.num_replicas > 1:
                results |= dict(zip(PARTS, (self.num_replicas, self.shards), strict=True))
            else:
                results[axis] = getattr(self, axis)
        return results

    def stride(self, axis: str) -> int:
        """The stride of an axis: the difference between the device numbers of neighbours on it. For
        data where it has two parts: of the part that ZeRO shards over."""
        sizes = self.sizes
        return stride(sizes, "shard" if axis == "data" and axis not in sizes else axis)

    @property
    def reordered(self) -> tuple[str, ...]:
        """The axes with several devices, outermost first, where that is not the usual order."""
        own, usual = ([axis for axis in order if getattr(self, axis) > 1]
                      for order in (self.order, AXES))  # fmt: skip
        return tuple(own) if own != usual else ()

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one stage of one replica together: expert x context x tensor."""
        return self.expert * self.context * self.tensor

    @property
    def tensor_over_heads(self) -> int:
        """The number of tensor ranks that split the heads that are left on a context rank."""
        return self.tensor if self.context > 1 else 1

    @property
    def shards(self) -> int:
        """Devices of the data axis over which ZeRO shards."""
        return self.shard_size or self.data

    @property
    def num_replicas(self) -> int:
        """How many copies of what ZeRO shards the data axis holds."""
        return self.data // self.shards

    @property
    def shard_axis(self) -> str:
        """The mesh axis of ZeRO's shards: "shard", or "data" where that is all of it."""
        return "shard" if self.shard_size else "data"

    def ranks(self, axis: str) -> int:
        """Devices on a mesh axis; "shard" and "replicate" are the two parts of data."""
        parts = {"shard": self.shards, "replicate": self.num_replicas}
        return parts[axis] if axis in parts else int(getattr(self, axis))

    @property
    def gathers_low(self) -> bool:
        """Whether ZeRO 3 gathers parameters in the compute dtype: where everything that reads them
        uses that dtype, and the backward does not read what the forward gathered."""
        through = self.precision.stream != "float32"
        return (
            through and self.zero == 3 and self.data > 1 and self.reshard_after_forward != "never"
        )

    @property
    def holds_gathered(self) -> bool:
        """Whether ZeRO 3 gathers parameters once a step, and holds them for all microbatches."""
        return self.zero == 3 and self.data > 1 and self.reshard_after_forward == "once_per_step"

    @property
    def holds_casts(self) -> bool:
        """Whether parameters are cast once a step, and the casts held for all microbatches."""
        low = self.precision.compute != "float32" and "parameters" not in self.offload
        return self.cast_once and low and not (self.zero == 3 and self.data > 1)

    @cached_property
    def recomputed(self) -> dict[str, tuple[str, ...]]:
        """Block that is recomputed → the values that are saved of it, () if none."""
        several = {block: own.saved for own in self.selective for block in own.blocks}
        return {**dict.fromkeys(self.recompute, ()), **several}

    def with_recomputed(self, saved: Mapping[str, tuple[str, ...]]) -> Plan:
        """This plan with other blocks recomputed: block → the values that are saved of it, () if
        none."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for block, values in saved.items():
            groups.setdefault(values, []).append(block)
        whole = tuple(groups.pop((), ()))
        selective = tuple(Selective(tuple(blocks), values) for values, blocks in groups.items())
        result = object.__new__(type(self))  # often called: `replace` is three times as slow
        changed = {"recompute": whole, "selective": selective}
        vars(result).update({k: v for k, v in vars(self).items() if k != "recomputed"} | changed)
        return result

    @property
    def decisions(self) -> dict[str, Any]:
        """Everything that was decided, by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_DECISION}

    @property
    def microbatch_size(self) -> int:
        """Examples in one microbatch on one data rank."""
        return self.batch // (self.data * self.microbatches)

    @property
    def usual(self) -> float:
        """Examples in a step per group of devices that hold a stage together, by which placements
        are chosen: identical for all plans of these devices with these axes."""
        return max(1.0, self.batch * self.model_parallel_size / self.devices)

    def to_json(self) -> str:
        """Stable JSON: sorted keys, bytes as integers, seconds as floats."""
        data = asdict(replace(self, axis_placements=()))
        data["axis_placements"] = {axis: to_data(own) for axis, own in self.axis_placements}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from JSON of the current schema or of schema 1. Raises ValueError for another
        schema or unknown fields."""
        data = _upgraded(json.loads(text))
        if data.get("schema") != SCHEMA:
            raise ValueError(f"plan schema {data.get('schema')!r}; this version reads {SCHEMA}")
        unknown = set(data) - {f.name for f in fields(Plan)}
        if unknown:
            raise ValueError(f"unknown fields in plan: {', '.join(sorted(unknown))}")
        if sorted(data.get("order", AXES)) != sorted(AXES):
            raise ValueError(f"order {data['order']!r} is not one of {', '.join(AXES)}")
        prediction = data.pop("prediction")
        if prediction is not None:
            prediction = prediction_of(prediction)
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in data.items()
            if k
            not in (
                "precision",
                "alternatives",
                "placements",
                "rates",
                "selective",
                "axis_placements",
            )
        }
        return Plan(
            **plain,
            selective=tuple(
                Selective(tuple(own["blocks"]), tuple(own["saved"]))
                for own in data.get("selective", ())
            ),
            placements=tuple(
                (name, tuple(Sharded(**s) for s in splits))
                for name, splits in data.get("placements", ())
            ),
            rates=tuple((axis, tuple(values)) for axis, values in data.get("rates", ())),
            axis_placements=tuple(
                (axis, from_data(own))
                for axis, own in sorted(data.get("axis_placements", {}).items())
            ),
            precision=_precision_of(data["precision"]),
            alternatives=tuple(Alternative(**a) for a in data["alternatives"]),
            prediction=prediction,
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    def decided(self, **changes: Any) -> Plan:
        """The same plan with some decisions changed and the predictions dropped."""
        return replace(self, prediction=None, alternatives=(), certificate="", **changes)


def _upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a schema 1 plan in the names of schema 2; of others, unchanged."""
    if data.get("schema") != 1:
        return data
    new = {**data, "schema": SCHEMA, "shard_size": data.get("shard", 0)}
    new["reshard_after_forward"] = _WORDS[data.get("gather_again", True)]
    names = {"gather_again": "reshard_after_forward", "shard": "shard_size", "pins": "placements",
             "stages": "stage_of"}  # fmt: skip
    new["pinned"] = [names.get(name, name) for name in data.get("pinned", ())]
    return {name: value for name, value in new.items() if name not in ("shard", "gather_again")}


def _precision_of(data: Mapping[str, Any]) -> Precision:
    """The dtypes of a plan's JSON; `matmul` may have its former name, `products`."""
    return Precision(**{"matmul" if name == "products" else name: v for name, v in data.items()})
