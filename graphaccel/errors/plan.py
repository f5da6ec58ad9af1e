"""Errors of planning (2xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError, listed, named_module, sized
from graphaccel.errors.messages import Location, Message, columns, format_bytes


@dataclass(kw_only=True, eq=False, repr=False)
class InfeasiblePlan(GraphAccelError):
    """No plan fits the memory.

    memory, peak: bytes per device. stage: where the closest plan's peak is. closest: that plan in
    words. breakdown: bytes per category at the peak. relaxations: (change, its effect), each of
    which alone makes it fit. useless: changes that were tried and do not help. host, host_memory:
    bytes that it needs on a host, and that are available, per device.
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
    host: int = 0
    host_memory: int = 0

    def message(self) -> Message:
        over = format_bytes(self.peak - self.memory)
        details = [f"closest: {self.closest}", f"         {sized(self.breakdown)}"]
        if self.relaxations:
            details.append("any one of these makes it fit:")
            details += [f"  {line}" for line in columns(self.relaxations)]
        else:
            details.append("no single change that was tried makes it fit")
        if self.useless:
            details.append(f"would not help: {', '.join(self.useless)}")
        if self.peak <= self.memory:
            return Message(
                f"no plan fits {self.devices} x {format_bytes(self.memory)} with "
                f"{format_bytes(self.host_memory)} of its host each; the closest needs "
                f"{format_bytes(self.host)} of it "
                f"({format_bytes(self.host - self.host_memory)} over)",
                details=tuple(details),
            )
        return Message(
            f"no plan fits {self.devices} x {format_bytes(self.memory)}; the closest needs "
            f"{format_bytes(self.peak)} ({over} over, on stage {self.stage})",
            details=tuple(details),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class BadPin(GraphAccelError):
    """A pin, or a decision of a plan that was given (`plan`: what it is called), has an invalid
    value. allowed: valid values."""

    code = "GA202"
    pin: str
    value: object
    reason: str
    allowed: tuple[str, ...] = ()
    plan: str = ""

    def message(self) -> Message:
        choices = tuple(f"{self.pin}={_typed(self.pin, str(value))}" for value in self.allowed)
        if self.plan:
            new = f"make a new one:  graphaccel plan FILE --devices N --json {self.plan}"
            return Message(
                f"plan `{self.plan}` says {self.pin}={self.value!r}, which can not be planned",
                why=self.reason,
                help=(new, f"pinned, it is one of:  {'  '.join(choices)}") if choices else (new,),
            )
        return Message(
            f"{self.pin}={self.value!r} can not be planned",
            why=self.reason,
            help=(f"use one of:  {'  '.join(choices)}",)
            if choices
            else (f"leave {self.pin} out and it will be chosen for you",),
        )


def _typed(pin: str, value: str) -> str:
    """A value of a pin as it is typed in Python."""
    if pin == "order":
        return repr(tuple(value.split(",")))
    return value if value.isdecimal() or value in ("True", "False") else repr(value)


@dataclass(kw_only=True, eq=False, repr=False)
class TooManyStages(GraphAccelError):
    """More pipeline stages were requested than the graph can be cut into."""

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
    """More devices were requested than exist. where: what was counted, e.g. "CUDA devices"."""

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
    """The batch cannot be split into equal microbatches. allowed: microbatch counts that can be
    used. devices, batches: numbers of devices, and batches, near those requested that would work.
    widest: the largest data axis that divides both; stages: into how many the graph can be cut.
    reason: why ignored rows cannot complete the batch. left_out_by: for the last batch of each
    epoch, asked about before it comes: the argument that leaves it out.
    """

    code = "GA206"
    batch: int
    microbatches: int
    data: int
    allowed: tuple[int, ...]
    devices: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    widest: int = 1
    stages: int = 0
    reason: str = ""
    left_out_by: str = ""

    def message(self) -> Message:
        parts = self.microbatches * self.data
        if self.reason:
            last = f"the last batch of each epoch, {self.batch} rows,"
            which = last if self.left_out_by else f"a batch of {self.batch}"
            left_out_by = self.left_out_by or "DataLoader(dataset, batch_size=..., drop_last=True)"
            return Message(
                f"{which} can not be cut into {parts} equal parts "
                f"({self.microbatches} microbatches x data {self.data}), and rows to complete it "
                "would change the result",
                why=self.reason,
                help=(
                    f"leave a last, smaller batch out:  {left_out_by}",
                    f"or use a batch that is a multiple of {parts}",
                ),
            )
        if self.devices or self.batches:
            left = self.data // self.widest
            return Message(
                f"a batch of {self.batch} can not be shared by {self.data} devices",
                why=f"the largest data axis that divides both is {self.widest}, and the graph can "
                f"be cut into {self.stages} stages, not into the {left} that are left"
                if self.widest > 1
                else "no data axis divides both, and the graph has too few stages for a pipeline "
                "of all devices",
                help=(
                    f"use another number of devices:  {listed(self.devices)}",
                    f"or another global batch:  {listed(self.batches)}",
                ),
            )
        return Message(
            f"a batch of {self.batch} can not be cut into {parts} equal parts "
            f"({self.microbatches} microbatches x data {self.data})",
            why="microbatches of different sizes would change the loss",
            help=(
                f"with data={self.data} use microbatches= one of:  {listed(self.allowed)}"
                if self.allowed
                else f"use a batch that is a multiple of {parts}",
                "or leave a last, smaller batch out:  "
                "DataLoader(dataset, batch_size=..., drop_last=True)",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class SplitRefused(GraphAccelError):
    """An op does not give the same result when the batch is split. axis: "microbatch" or "data".
    outside: the script computes the loss. Without an op, the text consists of the reason."""

    code = "GA207"
    axis: str
    op: str
    module: str
    location: Location | None = None
    reason: str
    outside: bool = False

    def message(self) -> Message:
        pin = "microbatches" if self.axis.startswith("micro") else "data"
        what, why = self.reason, ""
        if self.op:
            what, why = (
                f"{self.op} in {named_module(self.module)} needs the whole batch",
                self.reason,
            )
        help_lines = [f"keep the batch whole on this axis:  {pin}=1"]
        if self.outside:
            help_lines = [
                "give the loss to optimize, where it may mix examples:  loss_fn=loss_fn",
                "or run on one device:  devices=1",
            ]
        return Message(
            f"the batch can not be split over the {self.axis} axis: {what}",
            self.location,
            why=why,
            help=tuple(help_lines),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ScheduleRefused(GraphAccelError):
    """A schedule that starts backwards before the last forward, where an op of the loss needs all
    microbatches at once."""

    code = "GA213"
    schedule: str
    op: str
    module: str
    location: Location | None = None
    reason: str

    def message(self) -> Message:
        return Message(
            f"schedule={self.schedule!r} starts backwards before the last forward, and {self.op} "
            f"in {named_module(self.module)} needs all microbatches at once",
            self.location,
            why=self.reason,
            help=(
                "run all forwards first:  schedule='gpipe'",
                "or keep the batch whole:  microbatches=1",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Unsupported(GraphAccelError):
    """No plan supports this. what: e.g. "dtype torch.complex64 of parameter w". other_help: another
    way out."""

    code = "GA208"
    what: str
    reason: str
    help_line: str = ""
    other_help: str = ""

    def message(self) -> Message:
        help_lines = tuple(line for line in (self.help_line, self.other_help) if line)
        return Message(f"{self.what} is not supported", why=self.reason, help=help_lines)


@dataclass(kw_only=True, eq=False, repr=False)
class CannotExport(GraphAccelError):
    """Another system cannot express what a plan decides. reasons: each decision, and why not."""

    code = "GA209"
    target: str
    plan: str
    reasons: tuple[str, ...]

    def message(self) -> Message:
        return Message(
            f"{self.target} can not run this plan: {self.plan}",
            details=self.reasons,
            why="what is left out of a configuration would be decided otherwise there",
            help=(
                "leave out what is pinned of these, or run the plan here:  "
                'graphaccel.optimize(model, plan="plan.json")',
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ConflictingPins(GraphAccelError):
    """Pins that no plan can satisfy together, though each could be kept without the rest.

    pins: the smallest set that conflicts. instead: for each, the values with which the others could
    stay.
    """

    code = "GA210"
    pins: dict[str, object]
    devices: int
    reason: str
    instead: dict[str, tuple[object, ...]]

    def message(self) -> Message:
        names = [*self.pins]
        said = [f"{name}={value!r}" for name, value in self.pins.items()]
        rows = []
        for name, text in zip(names, said, strict=True):
            values = "  ".join(f"{name}={value!r}" for value in self.instead.get(name, ()))
            rows.append((text, f"with the others:  {values}" if values else "leave it out"))
        return Message(
            f"{', '.join(said[:-1])} and {said[-1]} can not be kept together on "
            f"{self.devices} device{'s' if self.devices > 1 else ''}",
            details=columns(rows),
            why=self.reason,
            help=(f"leave one of them out, and it will be chosen for you:  {listed(names)}",),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NotElementwise(GraphAccelError):
    """An optimizer cannot work on parameters that are spread over devices. reason: what its step
    needs. own: it is not torch's, and may be declared to be elementwise. inner: its attribute that
    is the optimizer it steps."""

    code = "GA211"
    optimizer: str
    reason: str
    own: bool = False
    inner: str = ""

    def message(self) -> Message:
        declared = (
            f"if it treats every number by itself:  {self.optimizer}.graphaccel_elementwise = True",
        )
        around = (
            "or optimize the other one, and step this one around it:  "
            f"graphaccel.optimize(model, optimizer.{self.inner})",
        )
        return Message(
            f"{self.optimizer} does not work on parameters that are spread over devices",
            why=f"the step must be that of one device, and {self.reason}",
            help=(
                "keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1",
                *(declared if self.own else ()),
                *(around if self.inner else ()),
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
