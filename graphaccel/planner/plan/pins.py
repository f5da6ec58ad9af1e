"""Every decision a user can pin: one dataclass field each, with its type, choices and help.

The fields are the one source of the checks of single values, the command-line options, the typed
keyword arguments of `optimize` and `plan` (`cli.pin_options`), and the table of `docs/pins.md`.
A pin that is left out is None, and the planner decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from math import isqrt
from typing import TYPE_CHECKING, Any

from graphaccel.schedule.table import SCHEDULE_NAMES

if TYPE_CHECKING:
    from graphaccel.ir.program import Sharded

RECOMPUTE = ("none", "some", "selective", "all")
RESHARDS = ("always", "once_per_step", "never")
OFFLOADS = (
    "none", "optimizer", "activations", "optimizer+activations", "optimizer+parameters",
    "optimizer+parameters+activations",
)  # fmt: skip


@dataclass(frozen=True)
class Pin:
    """The metadata of one pin.

    group: heading in the documents. kind: how a value is read and checked: "count" (a whole number
    above 0), "bytes", "level" (a number of `choices`), "switch" (a bool), "choice" (a word of
    `choices`), "names" (words), "word or names" (a word of `choices`, or names), "offload",
    "placements" or "stages" (mappings). type: the annotation of its keyword argument. help: one
    sentence. needs: what it depends on. numerics: how it changes numbers beyond rounding. metavar,
    option: on the command line; with option None the pin exists in Python only.
    """

    group: str
    kind: str
    type: str
    help: str
    choices: tuple[Any, ...] = ()
    needs: str = ""
    numerics: str = ""
    metavar: str = ""
    option: str | None = ""


def _pin(group: str, kind: str, help: str, **known: Any) -> Any:
    types = {
        "count": "int", "bytes": "int", "switch": "bool", "level": "int",
        "names": "Sequence[str]", "word or names": "str | Sequence[str]",
        "placements": "Mapping[str, Sharded | tuple[Sharded, ...]]",
        "stages": "Mapping[str, int]",
    }  # fmt: skip
    choices = known.get("choices", ())
    literal = f"Literal[{', '.join(map(repr, choices))}]" if choices else "str"
    written = {"choice": literal, "offload": literal, "level": literal}.get(kind) or types[kind]
    return field(default=None, metadata={"pin": Pin(group, kind, written, help, **known)})


@dataclass(frozen=True)
class Pins:
    """The user's decisions; None where there is none. recompute: one of `RECOMPUTE` or block names.
    placements: parameter → its placement, including those that `vocab` stands for. stage_of: module
    path and its stage, in the order of the graph. fusions: read by `kernels.registry.enabled`.
    spared: not a pin; what is offloaded because nothing fits otherwise, where `offload` is not
    pinned."""

    data: int | None = _pin("mesh", "count", "ranks of the data axis: parts of the batch")
    pipeline: int | None = _pin(
        "mesh",
        "count",
        "ranks of the pipeline axis: groups of devices with some of the layers each",
    )
    tensor: int | None = _pin("mesh", "count", "devices that share every matmul")
    context: int | None = _pin("mesh", "count", "devices that share every sequence")
    expert: int | None = _pin("mesh", "count", "devices that share the experts of a mixture")
    interleave: int | None = _pin(
        "pipeline", "count", "stages on each pipeline rank", needs="pipeline > 1"
    )
    microbatches: int | None = _pin(
        "pipeline", "count", "parts of the batch that run one after the other"
    )
    order: tuple[str, ...] | None = _pin(
        "mesh", "names", "the mesh axes over the devices, the outermost first", metavar="AXES"
    )
    zero: int | None = _pin(
        "zero", "level", "shard over data: 1 optimizer state, 2 and gradients, 3 and parameters",
        choices=(0, 1, 2, 3), needs="data > 1",
    )  # fmt: skip
    shard_size: int | None = _pin(
        "zero", "count", "ZeRO shards over groups of N devices of the data axis, replicated over "
        "the rest", needs="zero > 0",
    )  # fmt: skip
    sequence: bool | None = _pin(
        "tensor and context", "switch", "shard activations along the sequence between matmuls",
        needs="tensor > 1",
    )  # fmt: skip
    scatter_sends: bool | None = _pin(
        "tensor and context", "switch", "each tensor rank sends a part of what all of them hold",
        needs="tensor > 1 and pipeline > 1",
    )  # fmt: skip
    reshard_after_forward: str | None = _pin(
        "zero", "choice", "free gathered parameters after the forward and gather them again for "
        "the backward, keep them for the backward, or gather them once a step for all microbatches",
        choices=RESHARDS, needs="zero 3",
    )  # fmt: skip
    cast_once: bool | None = _pin(
        "precision", "switch", "cast parameters to 16 bits once a step, for all microbatches",
        needs="a 16-bit precision, without zero 3",
    )  # fmt: skip
    context_by: str | None = _pin(
        "tensor and context", "choice", "in attention each device has some of the heads, or some "
        "of the queries", choices=("heads", "sequence"), needs="context > 1",
    )  # fmt: skip
    accumulation: str | None = _pin(
        "zero", "choice", "reduce gradients in the last microbatch, or in each, for less memory",
        choices=("whole", "shards"), needs="zero 2 or 3",
    )  # fmt: skip
    recompute: str | tuple[str, ...] | None = _pin(
        "memory", "word or names", "none, some (as much as memory asks for), selective (of every "
        "block what memory asks for), all, or names of blocks", choices=RECOMPUTE, metavar="WHAT",
    )  # fmt: skip
    schedule: str | None = _pin(
        "pipeline", "choice", "order of forwards and backwards",
        choices=SCHEDULE_NAMES, needs="pipeline > 1",
    )  # fmt: skip
    cuts: tuple[str, ...] | None = _pin(
        "pipeline", "names", "ops after which a stage ends, as the report names them",
        metavar="NODES", needs="pipeline > 1",
    )  # fmt: skip
    bucket_bytes: int | None = _pin(
        "zero", "bytes", "size of the buckets in which gradients are reduced: 25MiB", metavar="SIZE"
    )
    precision: str | None = _pin(
        "precision", "choice", "dtypes of matmuls, activations and parameters in the step; auto: "
        "the fastest of fp32, bf16 and bf16-params",
        choices=("fp32", "bf16", "bf16-params", "fp16", "tf32", "fp8", "auto"),
        numerics="rounds matmuls (and what follows) to the named precision",
    )  # fmt: skip
    compile: str | None = _pin(
        "kernels",
        "choice",
        "what runs the graphs of stages; auto, the default: Inductor on GPUs",
        choices=("off", "auto", "inductor"),
    )
    min_cut: bool | None = _pin(
        "kernels", "switch", "choose value by value, by a min-cut, what a forward saves and what "
        "its backward recomputes; by default where Inductor compiles for a GPU and there is no "
        "pipeline",
        numerics="rounds elementwise calls otherwise: they are decomposed",
    )  # fmt: skip
    cuda_graphs: bool | None = _pin(
        "kernels", "switch", "record the work of each action once, and replay it in every step",
        needs="GPUs",
    )  # fmt: skip
    fusions: str | tuple[str, ...] | None = _pin(
        "kernels", "word or names", "fused ops: off, auto (the default on GPUs), or names; -NAME "
        "takes one away",
        choices=("off", "auto"), metavar="WHAT",
    )  # fmt: skip
    loss_chunk: int | None = _pin(
        "memory", "count", "tokens of which a fused head and loss has the logits at a time",
        needs="a fused head and loss",
    )  # fmt: skip
    offload: tuple[str, ...] | None = _pin(
        "memory", "offload", "on the host: optimizer state (stepped there), large activations "
        "until their backward, and parameters, copied to the device for each block; by default "
        "only where nothing fits otherwise, or where a step takes less", choices=OFFLOADS,
    )  # fmt: skip
    vocab: str | None = _pin(
        "placement", "choice", "where embedding and head are: a shard on each data rank, or split "
        "by words", choices=("data", "tensor"),
    )  # fmt: skip
    stage_of: tuple[tuple[str, int], ...] | None = _pin(
        "placement", "stages", "the pipeline stage of a module; may be given several times",
        metavar="MODULE=N", needs="pipeline > 1",
    )  # fmt: skip
    placements: tuple[tuple[str, tuple[Sharded, ...]], ...] | None = _pin(
        "placement", "placements", "how single parameters are placed: graphaccel.shard(dim, axis) "
        "or graphaccel.replicate(), by name or module path", option=None,
    )  # fmt: skip
    outputs: str | None = _pin(
        "placement", "choice", "what a training step returns besides the loss",
        choices=("loss", "all"), option=None,
    )  # fmt: skip
    ort: str | tuple[str, ...] | None = _pin(
        "kernels", "word or names", "what ONNX Runtime runs: off, auto (what was measured to be "
        "faster), all, or module paths", choices=("off", "auto", "all"), metavar="WHAT",
    )  # fmt: skip
    fallback: str | None = _pin(
        "kernels", "choice", "what happens with a part that ONNX Runtime or Inductor fails to "
        "build or run: an error, or torch runs it", choices=("error", "fx"), option=None,
        needs="ort, or compile",
    )  # fmt: skip
    spared: tuple[str, ...] = ()

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one stage of one replica together."""
        return (self.expert or 1) * (self.context or 1) * (self.tensor or 1)

    @property
    def zeros(self) -> tuple[int, ...]:
        """The ZeRO levels that are compatible with the pins, ascending."""
        if self.zero is not None:
            return (self.zero,)
        if self.reshard_after_forward not in (None, "always"):
            return (3,)
        if self.accumulation == "shards":
            return (2, 3)
        asked = self.shard_size is not None and not self.over_data
        return (1, 2, 3) if asked else (0, 1, 2, 3)

    @property
    def over_data(self) -> bool:
        """Whether single parameters are pinned to be sharded over data."""
        return any(split.axis == "data" for _, splits in self.placements or () for split in splits)

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the plan offloads to the host."""
        return self.spared if self.offload is None else self.offload

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the pins that are set."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)


PINS: Mapping[str, Pin] = {f.name: f.metadata["pin"] for f in fields(Pins) if "pin" in f.metadata}
"""The pins by the name of their keyword argument."""
NAMES = tuple(PINS)


def pins_of_kind(*kinds: str) -> tuple[str, ...]:
    """Names of the pins of these kinds."""
    return tuple(name for name, pin in PINS.items() if pin.kind in kinds)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
