"""Every error graphaccel raises on purpose: one class per code, with readable fields and a text.

The text names the user's own source line where one is known, says why, and every `help:` line can
be pasted. The fields stay on the exception, so that notebooks and CI need not parse the text.
The long form of each code is the page `docs/errors/<code>.md`, printed by `graphaccel explain`.

All fields are keyword arguments. Sizes are bytes, unless a field says otherwise. Nothing here
imports torch, and every error survives pickling (it may travel between processes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from graphaccel.messages import Location, Message, columns, format_bytes


def _named(module: str) -> str:
    return f"`{module}`" if module else "the model"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _sizes(parts: Mapping[str, int]) -> str:
    return " · ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())


@dataclass(eq=False, repr=False)
class GraphAccelError(Exception):
    """Base of all errors. `str(error)` is the full text; `error.code` its code.

    A subclass is a dataclass: its fields are the keyword arguments, `message()` makes the text.
    """

    code: ClassVar[str] = "GA000"

    def __post_init__(self) -> None:
        super().__init__(self.message().render(self.code))

    def message(self) -> Message:
        """The parts of the text; each subclass says its own."""
        return Message("graphaccel failed")

    def __reduce__(self) -> tuple[object, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuild, (type(self), values)


def _rebuild(cls: type[GraphAccelError], values: dict[str, object]) -> GraphAccelError:
    return cls(**values)


# --- 1xx: capture ---------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class TensorBranch(GraphAccelError):
    """The model branches on the value of a tensor."""

    code = "GA101"
    module: str
    location: Location | None = None
    others: tuple[Location, ...] = ()

    def message(self) -> Message:
        return Message(
            f"cannot capture {_named(self.module)}: it branches on the value of a tensor",
            self.location,
            note="this becomes a Python value, so the graph would depend on the data",
            why="graphaccel needs one graph for every batch",
            help=("make it branch-free:  x = torch.where(condition, a, b)",),
            others=self.others,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CaptureRefused(GraphAccelError):
    """torch.export found something else that has no graph."""

    code = "GA102"
    module: str
    location: Location | None = None
    reason: str

    def message(self) -> Message:
        return Message(
            f"cannot capture {_named(self.module)}: this has no graph",
            self.location,
            why=self.reason,
            help=("to see torch's own report:  GRAPHACCEL_TRACEBACK=full python train.py",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NoLoss(GraphAccelError):
    """Something that needs the loss in the graph was asked for. asked: e.g. "pipeline=2"."""

    code = "GA103"
    asked: str

    def message(self) -> Message:
        return Message(
            f"{self.asked} needs the loss in the graph, and the model returns none",
            why="backward of one microbatch runs between the forwards of others, "
            "before the script could compute a loss",
            help=(
                "return the loss from the model: a scalar, or an output with a field `loss`",
                "or pass a function of the model's output and the targets:  "
                "graphaccel.optimize(model, optimizer, loss_fn=loss_fn)",
            ),
        )


# --- 2xx: plan ------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class InfeasiblePlan(GraphAccelError):
    """No plan fits the memory.

    memory, peak: bytes per device. stage: where the closest plan's peak is. closest: that plan in
    words. breakdown: bytes per category at the peak. relaxations: (change, its effect), each of
    which alone makes it fit. useless: changes that were tried and do not help.
    """

    code = "GA201"
    devices: int
    memory: int
    peak: int
    stage: int
    closest: str
    breakdown: dict[str, int]
    relaxations: tuple[tuple[str, str], ...] = ()
    useless: tuple[str, ...] = ()

    def message(self) -> Message:
        over = format_bytes(self.peak - self.memory)
        details = [f"closest: {self.closest}", f"         {_sizes(self.breakdown)}"]
        if self.relaxations:
            details.append("any one of these makes it fit:")
            details += [f"  {line}" for line in columns(self.relaxations)]
        else:
            details.append("no single change that was tried makes it fit")
        if self.useless:
            details.append(f"would not help: {', '.join(self.useless)}")
        return Message(
            f"no plan fits {self.devices} x {format_bytes(self.memory)}; the closest needs "
            f"{format_bytes(self.peak)} ({over} over, on stage {self.stage})",
            details=tuple(details),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadPin(GraphAccelError):
    """A pinned decision has a value that can not be. allowed: values that can."""

    code = "GA202"
    pin: str
    value: object
    reason: str
    allowed: tuple[str, ...] = ()

    def message(self) -> Message:
        choices = tuple(f"{self.pin}={value}" for value in self.allowed)
        return Message(
            f"{self.pin}={self.value!r} can not be planned",
            why=self.reason,
            help=(f"use one of:  {'  '.join(choices)}",)
            if choices
            else (f"leave {self.pin} out and it will be chosen for you",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class TooManyStages(GraphAccelError):
    """More pipeline stages were asked for than the graph can be cut into."""

    code = "GA203"
    asked: int
    possible: int
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the graph can not be cut into {self.asked} stages; {self.possible} is the most",
            self.location,
            note="the longest part that can not be cut",
            why="every stage needs at least one parameter and one op of its own",
            help=(f"use at most:  pipeline={self.possible}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class PlanMismatch(GraphAccelError):
    """A saved plan belongs to another model or cluster. differences: (what, in the plan, here)."""

    code = "GA204"
    path: str
    differences: tuple[tuple[str, str, str], ...]

    def message(self) -> Message:
        return Message(
            f"plan `{self.path}` was made for something else",
            details=columns((("", "plan", "here"), *self.differences)),
            why="its predictions and its stage cuts would not hold",
            help=(f"make a new one:  graphaccel plan FILE --devices N --json {self.path}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class TooManyDevices(GraphAccelError):
    """More devices were asked for than exist. where: what was counted, e.g. "CUDA devices"."""

    code = "GA205"
    asked: int
    available: int
    where: str

    def message(self) -> Message:
        return Message(
            f"{self.asked} devices asked for, {self.available} available ({self.where})",
            help=(
                f"use what is here:  devices={self.available}",
                "to plan for machines you do not have:  "
                f"graphaccel plan FILE --devices {self.asked} --device h100-80gb",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BatchNotDivisible(GraphAccelError):
    """The batch can not be cut into equal microbatches. allowed: microbatch counts that can.
    devices, batches: numbers of devices, and batches, near those asked that would do."""

    code = "GA206"
    batch: int
    microbatches: int
    data: int
    allowed: tuple[int, ...]
    devices: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()

    def message(self) -> Message:
        parts = self.microbatches * self.data
        if self.devices or self.batches:
            return Message(
                f"a batch of {self.batch} can not be shared by {self.data} devices",
                why="no data axis divides both, and the graph has too few stages for a pipeline "
                "of all devices",
                help=(
                    f"use another number of devices:  {_listed(self.devices)}",
                    f"or another global batch:  {_listed(self.batches)}",
                ),
            )
        return Message(
            f"a batch of {self.batch} can not be cut into {parts} equal parts "
            f"({self.microbatches} microbatches x data {self.data})",
            why="microbatches of different sizes would change the loss",
            help=(f"with data={self.data} use microbatches= one of:  {_listed(self.allowed)}",)
            if self.allowed
            else (f"use a batch that is a multiple of {parts}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class SplitRefused(GraphAccelError):
    """An op does not give the same result when the batch is split. axis: "microbatch" or "data"."""

    code = "GA207"
    axis: str
    op: str
    module: str
    location: Location | None = None
    reason: str

    def message(self) -> Message:
        pin = "microbatches" if self.axis.startswith("micro") else "data"
        return Message(
            f"the batch can not be split over the {self.axis} axis: {self.op} in "
            f"{_named(self.module)} needs the whole batch",
            self.location,
            why=self.reason,
            help=(f"keep the batch whole on this axis:  {pin}=1",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Unsupported(GraphAccelError):
    """No plan can hold this. what: e.g. "dtype torch.complex64 of parameter w"."""

    code = "GA208"
    what: str
    reason: str
    help_line: str = ""

    def message(self) -> Message:
        help_lines = (self.help_line,) if self.help_line else ()
        return Message(f"{self.what} is not supported", why=self.reason, help=help_lines)


@dataclass(kw_only=True, eq=False, repr=False)
class CannotExport(GraphAccelError):
    """Another system can not say what a plan decides. reasons: each decision, and why not."""

    code = "GA209"
    target: str
    plan: str
    reasons: tuple[str, ...]

    def message(self) -> Message:
        return Message(
            f"{self.target} can not run this plan: {self.plan}",
            details=self.reasons,
            why="what is left out of a configuration would be decided otherwise there",
            help=("pin what it can say, e.g.:  graphaccel plan FILE --devices N --pipeline 1",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ConflictingPins(GraphAccelError):
    """Pinned decisions that no plan can have together, though each could be kept without the rest.

    pins: the fewest that conflict. instead: for each, the values with which the others could stay.
    """

    code = "GA210"
    pins: dict[str, object]
    devices: int
    reason: str
    instead: dict[str, tuple[object, ...]]

    def message(self) -> Message:
        said = [f"{name}={value!r}" for name, value in self.pins.items()]
        rows = []
        for name, text in zip(self.pins, said, strict=True):
            values = "  ".join(f"{name}={value!r}" for value in self.instead.get(name, ()))
            rows.append((text, f"with the others:  {values}" if values else "leave it out"))
        return Message(
            f"{', '.join(said[:-1])} and {said[-1]} can not be kept together on "
            f"{self.devices} device{'s' if self.devices > 1 else ''}",
            details=columns(rows),
            why=self.reason,
            help=(f"leave one of them out, and it will be chosen for you:  {_listed(self.pins)}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NotElementwise(GraphAccelError):
    """An optimizer can not work on shards. known: names of those that can."""

    code = "GA211"
    optimizer: str
    known: tuple[str, ...]

    def message(self) -> Message:
        return Message(
            f"{self.optimizer} is not known to work on shards of parameters",
            why="the plan shards parameters or optimizer state, and a step on a shard must be that "
            "shard of the step on the whole",
            help=(
                f"these do:  {', '.join(self.known)}",
                "if it treats every number by itself:  "
                f"{self.optimizer}.graphaccel_elementwise = True",
                "or keep parameters and optimizer state whole:  zero=0, tensor=1",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CannotInitialise(GraphAccelError):
    """It is not known how a model on the meta device is initialised. model: its class's name."""

    code = "GA212"
    model: str
    reason: str

    def message(self) -> Message:
        return Message(
            f"the initial weights of `{self.model}` are not known",
            why=self.reason,
            help=(
                "say how it is built:  graphaccel.optimize(model, optimizer, "
                f"init_fn=lambda: {self.model}(...))",
                f"or build it so:  model = graphaccel.deferred(lambda: {self.model}(...))",
            ),
        )


# --- 3xx: rules -----------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class MissingRule(GraphAccelError):
    """Ops without a sharding rule. ops: (op, shape, module, location, uses), most costly first."""

    code = "GA301"
    ops: tuple[tuple[str, str, str, str, int], ...]

    def message(self) -> Message:
        rows = [(*row, f"{uses} {'use' if uses == 1 else 'uses'}") for *row, uses in self.ops]
        count = f"{len(rows)} op has" if len(rows) == 1 else f"{len(rows)} ops have"
        return Message(
            f"{count} no sharding rule",
            details=columns(rows) if rows else (),
            why="without a rule it is not known whether the batch may be split there",
            help=(*self._form(), "keep the batch whole:  data=1, microbatches=1"),
        )

    def _form(self) -> tuple[str, ...]:
        """Where to begin, with the most costly one."""
        if not self.ops:
            return ()
        space, _, name = self.ops[0][0].partition(".")
        rule = f'"{space}::{name.split(".")[0]}", "... d -> ... d", whole="d", example=(x,)'
        return (f"say how it may be split:  graphaccel.sharding_rule({rule})",)


@dataclass(kw_only=True, eq=False, repr=False)
class RuleWrong(GraphAccelError):
    """A user's sharding rule does not hold where it was run."""

    code = "GA302"
    op: str
    rule: str
    reason: str

    def message(self) -> Message:
        return Message(
            f"the sharding rule of {self.op} does not hold: {self.rule!r}",
            why=f"run whole and by shards on the example, {self.reason}",
            help=("name dims that can not be split:  whole='d'",),
        )


# --- 4xx: the training script ---------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class HookNotKept(GraphAccelError):
    """A hook would never be called. kind: e.g. "forward hook"."""

    code = "GA401"
    module: str
    kind: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the {self.kind} on {_named(self.module)} can not be kept",
            self.location,
            why="the step runs as one graph, in which modules are not called any more",
            help=(
                "remove it before optimize():  handle.remove()",
                "or return what it reads from the model's forward",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RetainGraph(GraphAccelError):
    """backward() was called twice, or with retain_graph=True or create_graph=True.

    kind: "together" where the loss is part of the graph; where it is outside, "create_graph", or
    "freed" for a second backward without retain_graph=True in the first.
    """

    code = "GA402"
    kind: str = "together"

    def message(self) -> Message:
        if self.kind == "create_graph":
            return Message(
                "the model's outputs can be differentiated to first order only",
                why="its backward is a graph made before, which has no derivative of its own",
                help=(
                    "leave create_graph=True out",
                    "or compute the term that needs it with a model that runs under no plan",
                ),
            )
        if self.kind == "freed":
            return Message(
                "the outputs of one call of the model were differentiated twice",
                why="what its backward reads was freed by the first",
                help=(
                    "keep it:  loss.backward(retain_graph=True)",
                    "or add losses before backward:  (loss_a + loss_b).backward()",
                ),
            )
        return Message(
            "the loss can be differentiated only once, to first order",
            why="forward and backward ran together when the model was called; "
            "nothing is kept for a second backward",
            help=(
                "add losses before backward:  (loss_a + loss_b).backward()",
                "or call the model again for the second backward",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NeedsLauncher(GraphAccelError):
    """Several devices were asked for where the program can not be restarted."""

    code = "GA403"
    devices: int
    command: str

    def message(self) -> Message:
        return Message(
            f"devices={self.devices} needs {self.devices} processes, and this one can not be "
            "restarted (notebook, interactive or piped Python)",
            why="every device is driven by a process of its own that runs the same script",
            help=(f"save the script to a file and start it so:  {self.command}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BatchesDiffer(GraphAccelError):
    """Ranks were given different batches. ranks: those that differ from rank 0."""

    code = "GA404"
    step: int
    ranks: tuple[int, ...]

    def message(self) -> Message:
        return Message(
            f"at step {self.step} the batch of rank {_listed(self.ranks)} differs from rank 0's",
            why="every rank is given the global batch and takes its own part of it",
            help=(
                "seed the shuffling alike on every rank:  torch.manual_seed(0)",
                "and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., "
                "shuffle=True)",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OutputDropped(GraphAccelError):
    """An output of the model that the plan does not compute on this rank was read."""

    code = "GA405"
    name: str

    def message(self) -> Message:
        return Message(
            f"output `{self.name}` is not kept in training by this plan",
            why="microbatches and stages would have to keep and send it; only the loss is",
            help=(
                "keep it:  graphaccel.optimize(model, optimizer, outputs='all')",
                "or compute it under torch.no_grad()",
                "or, if the script computes its loss from it:  "
                "graphaccel.optimize(model, optimizer, loss_fn='outside')",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BatchChanged(GraphAccelError):
    """A batch does not look like the one that was captured. what: e.g. "dtype of input_ids"."""

    code = "GA406"
    what: str
    expected: str
    got: str

    def message(self) -> Message:
        return Message(
            f"{self.what} changed: captured with {self.expected}, now {self.got}",
            why="the graph and the plan hold for batches like the captured one only",
            help=(
                "leave the last, smaller batch out:  DataLoader(dataset, drop_last=True)",
                "or capture with such a batch:  "
                "graphaccel.optimize(model, optimizer, example_batch=batch)",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class GraphMisuse(GraphAccelError):
    """The optimized model was used in a way its graph does not allow. what: a whole sentence."""

    code = "GA407"
    what: str
    help_line: str = ""

    def message(self) -> Message:
        return Message(self.what, help=(self.help_line,) if self.help_line else ())


# --- 5xx: while running ---------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class RankLost(GraphAccelError):
    """Another rank stopped answering. lost: in words, e.g. "rank 2 (stage 1)"."""

    code = "GA501"
    rank: int
    stage: int | None
    lost: str
    last_action: str
    waiting_for: str
    cause: str

    def message(self) -> Message:
        me = f"rank {self.rank}" + ("" if self.stage is None else f" (stage {self.stage})")
        return Message(
            f"{me} lost {self.lost}",
            details=columns(
                (
                    ("last action done:", self.last_action),
                    ("waiting for:", self.waiting_for),
                    ("reported:", self.cause),
                )
            ),
            why="a process died, or did not answer within the timeout",
            help=("the first error in the log of the lost rank is the cause; read that one first",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DeviceOutOfMemory(GraphAccelError):
    """A device ran out of memory. predicted, actual: bytes per category; owner: of the largest."""

    code = "GA502"
    stage: int
    action: str
    predicted: dict[str, int]
    actual: dict[str, int]
    owner: str

    def message(self) -> Message:
        def cell(parts: dict[str, int], name: str) -> str:
            return format_bytes(parts[name]) if name in parts else "-"

        names = list(dict.fromkeys((*self.predicted, *self.actual)))
        rows = [(name, cell(self.predicted, name), cell(self.actual, name)) for name in names]
        return Message(
            f"stage {self.stage} ran out of memory during {self.action}",
            details=(
                *columns((("", "predicted", "actual"), *rows)),
                f"largest live tensors belong to: {self.owner}",
            ),
            help=(
                "pin what saves most:  graphaccel.optimize(model, optimizer, recompute='all')",
                "or plan for less than the device has:  "
                "graphaccel plan FILE --devices N --memory SIZE --json plan.json",
            ),
        )


# --- 6xx: catalogue -------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownDevice(GraphAccelError):
    """A device name that is not in the catalogue. closest: names that are; known: all of them."""

    code = "GA601"
    name: str
    closest: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    def message(self) -> Message:
        return Message(
            f"no device named `{self.name}` in the catalogue",
            help=tuple(f"did you mean:  --device {name}" for name in self.closest)
            or ((f"there are:  {_listed(self.known)}",) if self.known else ()),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadCluster(GraphAccelError):
    """A description of devices and links that can not be. where: a file or an argument."""

    code = "GA602"
    where: str
    problems: tuple[str, ...]

    def message(self) -> Message:
        return Message(
            f"{self.where} describes no cluster",
            details=self.problems,
            why="times and memory are predicted from these figures",
            help=("start from a known device:  graphaccel plan FILE --devices N --device h100-80gb "
                  "--save-cluster cluster.json",),
        )  # fmt: skip


# --- 7xx: fusions ---------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class BadFusion(GraphAccelError):
    """A fusion that can not be registered."""

    code = "GA701"
    name: str
    reason: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the fusion `{self.name}` is refused: {self.reason}",
            self.location,
            help=("a fusion that works, to start from:  graphaccel fusion new NAME",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class KernelFailed(GraphAccelError):
    """A fused op raised while it ran. arguments: shape and dtype of each, or its value."""

    code = "GA702"
    name: str
    op: str
    arguments: tuple[str, ...]
    cause: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"the fused op `{self.op}` failed",
            self.location,
            details=(f"called with: {', '.join(self.arguments)}", self.cause),
            help=(
                f"without this fusion:  graphaccel.optimize(model, optimizer, "
                f'fusions=("auto", "-{self.name}"))',
                f"its checks on this machine:  graphaccel fusion check {self.name}",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownFusion(GraphAccelError):
    """A fusion's name that is not registered. closest: names that are."""

    code = "GA703"
    name: str
    known: tuple[str, ...] = ()
    closest: tuple[str, ...] = ()

    def message(self) -> Message:
        return Message(
            f"no fusion named `{self.name}`",
            details=(f"there are: {_listed(self.known)}",),
            help=tuple(f"did you mean:  {name}" for name in self.closest),
        )


# --- 8xx: ONNX Runtime ----------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class OrtMissing(GraphAccelError):
    """Regions for ONNX Runtime were asked for and it can not be used. asked: e.g. "ort='all'"."""

    code = "GA801"
    asked: str
    reason: str

    def message(self) -> Message:
        return Message(
            f"{self.asked} needs ONNX Runtime, which can not be used here",
            why=self.reason,
            help=(
                "install it:  pip install 'graphaccel[ort]'",
                "or do without:  ort='off'",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OrtMismatch(GraphAccelError):
    """A plan was made for another build of ONNX Runtime. planned, installed: "training 1.19.2"."""

    code = "GA802"
    planned: str
    installed: str

    def message(self) -> Message:
        return Message(
            f"the plan was made for ONNX Runtime {self.planned}, and {self.installed} is installed",
            why="builds have different kernels, so regions and predicted memory would differ",
            help=(
                "plan again here:  graphaccel plan FILE --devices N --json plan.json",
                "or install the build of the plan:  pip install 'graphaccel[ort]'"
                if self.planned.startswith("training")
                else "or install the build of the plan:  pip install onnxruntime",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class OrtFailed(GraphAccelError):
    """A session could not be built or did not run. region: module path and phase. op: the op of
    the model that failed, "" where the error does not say. path: where the ONNX model is."""

    code = "GA803"
    region: str
    action: str
    op: str
    path: str
    cause: str

    def message(self) -> Message:
        return Message(
            f"ONNX Runtime failed to {self.action} the region {self.region}"
            + (f" at {self.op}" if self.op else ""),
            details=columns((("model:", self.path), ("reported:", self.cause))),
            why="the region passed every check when it was placed",
            help=(
                "let torch run such regions:  graphaccel.optimize(model, optimizer, fallback='fx')",
                "or run without ONNX Runtime:  ort='off'",
                "to look at the model:  netron " + self.path,
            ),
        )


def error_classes() -> dict[str, type[GraphAccelError]]:
    """Every code and its class, in the order of the codes."""
    return dict(sorted((cls.code, cls) for cls in GraphAccelError.__subclasses__()))
