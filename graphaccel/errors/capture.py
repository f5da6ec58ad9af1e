"""Errors of capture (1xx) and of sharding rules (3xx)."""

from __future__ import annotations

from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError, named_module
from graphaccel.errors.messages import Location, Message, columns


@dataclass(kw_only=True, eq=False, repr=False)
class TensorBranch(GraphAccelError):
    """The model branches on the value of a tensor. assertion: whether an `assert` does. number:
    whether the line only makes a Python number of it. buffer: the name of the one that is asked.
    library: the line of an installed package that asks, as `file:line`. loop: whether it runs over
    what was found in a tensor (`for expert in hit.nonzero():`)."""

    code = "GA101"
    module: str
    location: Location | None = None
    others: tuple[Location, ...] = ()
    assertion: bool = False
    number: bool = False
    buffer: str = ""
    library: str = ""
    loop: bool = False

    def message(self) -> Message:
        lines = ("make it branch-free:  x = torch.where(condition, a, b)",)
        if self.assertion:
            lines = (
                "make the check outside of the model, or skip assertions:  python -O train.py",
            )
        if self.number:
            lines = (
                "leave it a tensor:  value = x.max()",
                "or return it, and read its value in the script:  return output, value",
            )
        if self.library:
            lines = (
                f"the branch is in {self.library}: call that in the script, outside of the model, "
                "and pass its result",
                "or write that part in the model, without the branch",
            )
        if self.buffer:
            lines = (
                "a flag is followed where the forward asks for it before it changes it",
                f"or make it branch-free:  x = torch.where(self.{self.buffer} == 0, a, b)",
            )
        if self.loop:
            lines = (
                "run each expert on all rows, with zero for those that did not choose it:  "
                "out = sum(gates[:, i, None] * expert(x) for i, expert in enumerate(experts))",
            )
        does = "takes the value of a tensor" if self.number else "branches on the value of a tensor"
        if self.loop:
            does = "loops over what it finds in a tensor"
        return Message(
            f"cannot capture {named_module(self.module)}: it {does}",
            self.location,
            note="this becomes a Python value, so the graph would depend on the data",
            why="what runs, and which weights get a gradient, would depend on the batch"
            if self.loop
            else "graphaccel needs one graph for every batch",
            help=lines,
            others=self.others,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class CaptureRefused(GraphAccelError):
    """Anything else that cannot be captured. help_line: what to type instead, where known."""

    code = "GA102"
    module: str
    location: Location | None = None
    reason: str
    help_line: str = ""

    def message(self) -> Message:
        return Message(
            f"cannot capture {named_module(self.module)}: this has no graph",
            self.location,
            why=self.reason,
            help=(
                self.help_line
                or "to see torch's own report:  GRAPHACCEL_TRACEBACK=full python train.py",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NoLoss(GraphAccelError):
    """Something was requested that needs the loss inside the graph. asked: e.g. "pipeline=2"."""

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


@dataclass(kw_only=True, eq=False, repr=False)
class GradientRuleRefused(GraphAccelError):
    """A custom gradient rule cannot be part of the graph.

    rule: what it is, e.g. "the backward of `Quantize`". line: what to type instead.
    """

    code = "GA104"
    module: str
    rule: str
    reason: str
    line: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(
            f"cannot capture {named_module(self.module)}: {self.rule} can not be part of the graph",
            self.location,
            why=self.reason,
            help=(self.line,),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UnregisteredWeight(GraphAccelError):
    """The forward reads a weight that is not among the model's parameters.

    name: how the script reaches it, in backticks. line: what registers it. of: the parameter or
    buffer that it is a view of, if any.
    """

    code = "GA105"
    module: str
    name: str
    line: str
    of: str = ""
    location: Location | None = None

    def message(self) -> Message:
        if self.of:
            return Message(
                f"cannot capture {named_module(self.module)}: {self.name} is another tensor on "
                f"the memory of `{self.of}`",
                self.location,
                why="the graph would keep its values of now, and not see an update of the other",
                help=(f"make it in forward:  self.{self.of}.detach()",),
            )
        return Message(
            f"cannot capture {named_module(self.module)}: {self.name} requires a gradient and is "
            "none of the model's parameters",
            self.location,
            why="it is not in model.parameters(), so no plan could hold, split or update it",
            help=(
                f"register it:  {self.line}",
                "or, if it is not to be trained, turn its gradient off:  "
                "weight.requires_grad_(False)",
            ),
        )


_RULE = "say how it may be split, if so:  graphaccel.sharding_rule"


@dataclass(kw_only=True, eq=False, repr=False)
class CaptureDiffers(GraphAccelError):
    """The captured graph does not compute the same as the model. values: what differs, a sentence
    each. rows: of the batch that were compared; None: all. node, op, phase, module, location: the
    first node that differs; empty where no node does, as where a gradient is missing."""

    code = "GA108"
    values: tuple[str, ...]
    rows: int | None = None
    node: str = ""
    op: str = ""
    phase: str = ""
    module: str = ""
    location: Location | None = None

    def message(self) -> Message:
        where = f"{self.node} ({self.op}, {self.phase})" if self.node else ""
        begins = (f"the first value that differs: {where} in {named_module(self.module)}",)
        rows = "the first batch" if self.rows is None else f"{self.rows} rows of the first batch"
        return Message(
            "the captured graph does not compute what the model computes",
            self.location,
            note="the first value that differs is made here" if self.location else "",
            details=(*self.values, *(begins if where else ())),
            why=f"on {rows} plain autograd gives other values, so that training would go wrong",
            help=(
                "see where it begins:  import graphaccel.debug; "
                "graphaccel.debug.bisect(model, batch)",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class PlanDiffers(GraphAccelError):
    """The planned programs do not compute the same as the captured graph. values: what differs, a
    sentence each.

    overflow: the dtype in which the forward overflows, where float32 does not, if that is why;
    location: where it first does.
    """

    code = "GA109"
    plan: str
    values: tuple[str, ...]
    overflow: str = ""
    location: Location | None = None

    def message(self) -> Message:
        if self.overflow:
            wider = "bf16" if self.overflow == "float16" else "fp32"
            return Message(
                f"the forward overflows in {self.overflow}, and not in float32: {self.plan}",
                self.location,
                note="the first value that is infinite or NaN",
                details=self.values,
                why="the loss scale keeps gradients in range, not what the forward computes",
                help=(
                    "compute in a wider dtype:  "
                    f'graphaccel.optimize(model, optimizer, precision="{wider}")',
                ),
            )
        return Message(
            f"the first step under the plan does not give what one device gives: {self.plan}",
            details=self.values,
            why="the captured graph, run whole on one device, has another loss or other gradients",
            help=(
                "keep the batch on one device:  graphaccel.optimize(model, optimizer, devices=1)",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UpdateDiffers(GraphAccelError):
    """The optimizer does not make of shards what it makes of whole parameters. values: what
    differs, a sentence each. declared: whether the script said that it does. location: of the
    step."""

    code = "GA110"
    optimizer: str
    values: tuple[str, ...]
    declared: bool = False
    location: Location | None = None

    def message(self) -> Message:
        lines = (
            "keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1",
            "the weights have had this update: start anew, or from a checkpoint",
        )
        if self.declared:
            lines = (f"leave out:  {self.optimizer}.graphaccel_elementwise = True", *lines)
        return Message(
            f"the first update of {self.optimizer} under the plan is not that of one device",
            self.location,
            details=self.values,
            why="a copy of it that stepped the same parameters whole changes them otherwise",
            help=lines,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class MissingRule(GraphAccelError):
    """Ops without a sharding rule. ops: (op, shape, module, location, uses), most costly first.
    form: arguments of `sharding_rule` that give the first one a rule."""

    code = "GA301"
    ops: tuple[tuple[str, str, str, str, int], ...]
    form: str = ""

    def message(self) -> Message:
        rows = [(*row, f"{uses} {'use' if uses == 1 else 'uses'}") for *row, uses in self.ops]
        count = f"{len(rows)} op has" if len(rows) == 1 else f"{len(rows)} ops have"
        return Message(
            f"{count} no sharding rule",
            details=columns(rows) if rows else (),
            why="without a rule it is not known whether the batch may be split there",
            help=(
                *(() if not self.form else (f"{_RULE}({self.form})",)),
                "keep the batch whole:  data=1, microbatches=1",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RuleWrong(GraphAccelError):
    """A user's sharding rule gave a wrong result where it was run."""

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
