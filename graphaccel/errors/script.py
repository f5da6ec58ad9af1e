"""Errors about how a script uses the model (4xx)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphaccel.errors.base import GraphAccelError, listed, named_module
from graphaccel.errors.messages import Location, Message, columns


@dataclass(kw_only=True, eq=False, repr=False)
class HookNotKept(GraphAccelError):
    """A hook would never be called, or, on the model itself ("") beside a loss_fn, with another
    output. kind: e.g. "forward hook"; `every`: it is one of the process, on every module."""

    code = "GA401"
    module: str
    kind: str
    every: bool = False
    location: Location | None = None

    def message(self) -> Message:
        if not self.module and not self.every and self.kind.startswith("forward"):
            return Message(
                f"the {self.kind} on the model can not be kept beside loss_fn",
                self.location,
                why="a call of the model takes the targets and returns the loss, which the hook "
                "would see in place of the model's own",
                help=(
                    "do in the model's forward, or in loss_fn, what the hook does",
                    "or let the script compute the loss:  "
                    "graphaccel.optimize(model, optimizer, loss_fn='outside')",
                ),
            )
        where = "every module" if self.every else named_module(self.module)
        return Message(
            f"the {self.kind} on {where} can not be kept",
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

    kind: "together" where the loss is part of the graph; where the script computes it,
    "create_graph", or "freed" for a second backward without retain_graph=True in the first.
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
    """Several devices were requested where the program cannot be restarted."""

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
    """Ranks got different batches, or differ in something else that a step depends on.

    ranks: those that differ from rank 0. what: "values" or "inputs" of the batch, "parts" of it
    that ranks give or the "rest" that they share, the "call" they make, "state" that the forward
    reads, "trained" parameters, "weights", "optimizer" or "random". expected, got: what rank 0 and
    the first of `ranks` do, in words.
    """

    code = "GA404"
    step: int
    ranks: tuple[int, ...]
    what: str = "values"
    expected: str = ""
    got: str = ""

    def message(self) -> Message:
        what, why, help_lines = _DIFFERENCES[self.what]
        rows = (("rank 0", self.expected), (f"rank {self.ranks[0]}", self.got))
        return Message(
            f"at step {self.step} {what.format(f'rank {listed(self.ranks)}')}",
            details=columns(rows) if self.got else (),
            why=why,
            help=help_lines,
        )


_SAME_BATCH = "every rank is given the global batch and takes its own part of it"
_SAME_CALLS = "every rank runs the same script and makes the same calls in the same order"
_SEED = (
    "seed the shuffling alike on every rank:  torch.manual_seed(0)",
    "and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., shuffle=True)",
    'or keep the sampler, and say that each rank reads its own rows:  optimize(..., batch="local")',
)
_DIFFERENCES = {
    "values": ("the batch of {} differs from rank 0's", _SAME_BATCH, _SEED),
    "inputs": ("the batch of {} has other inputs or shapes than rank 0's", _SAME_BATCH, _SEED),
    "parts": (
        "the part of the batch of {} has other inputs or shapes than rank 0's",
        'with batch="local" all ranks give as many rows, of the same sizes',
        (
            "leave out a last, smaller batch:  DataLoader(..., drop_last=True)",
            "and pad to the same length on every rank",
        ),
    ),
    "rest": (
        "inputs of {} that were not found to have rows differ from rank 0's",
        'with batch="local" rows of the ranks are joined; all else that they give is the same',
        (
            "say which dim of each input has the rows, 1 of `x` here:  "
            "optimize(..., batch=\"local\", batch_dims={'x': 1})",
        ),
    ),
    "call": (
        "{} does something else than rank 0",
        _SAME_CALLS,
        (
            "call it on every rank, not below `if rank == 0`",
            "and end the loop at the same step on every rank",
        ),
    ),
    "state": (
        "values that the model's forward reads differ on {} from rank 0's",
        _SAME_CALLS,
        ("change the model's attributes on every rank, not below `if rank == 0`",),
    ),
    "trained": (
        "other parameters require a gradient on {} than on rank 0",
        _SAME_CALLS,
        ("freeze and unfreeze on every rank, not below `if rank == 0`",),
    ),
    "optimizer": (
        "the optimizer of {} differs from rank 0's, in its settings or in how often it stepped",
        _SAME_CALLS,
        (
            "step optimizer and scheduler on every rank; give the scheduler the same metric:  "
            "scheduler.step(loss.item())",
        ),
    ),
    "weights": (
        "the weights of {} differ from those of a rank that holds the same part of the model",
        "what one rank alone does to gradients or weights makes the models of the ranks drift "
        "apart",
        (
            "clip, scale and set gradients and weights on every rank, not below `if rank == 0`",
            "and where they are changed by random numbers, draw on every rank alike:  "
            "torch.manual_seed(0)",
        ),
    ),
    "random": (
        "torch's random state on {} differs from rank 0's",
        "ranks that hold parts of one value draw its dropout mask alike",
        ("draw on every rank alike, or from another generator:  torch.Generator()",),
    ),
}


@dataclass(kw_only=True, eq=False, repr=False)
class OutputDropped(GraphAccelError):
    """An output of the model that the plan does not compute on this rank was read.

    attribute: it is not an output, but what the forward stores in an attribute, or an entry of a
    container. outside: of the script, not of the model.
    """

    code = "GA405"
    name: str
    attribute: bool = False
    outside: bool = False

    def message(self) -> Message:
        if self.attribute:
            names = [part for part in re.split(r"\W", self.name) if part.isidentifier()]
            held, whose = ("", "the model's") if self.outside else (" of the model", "its")
            return Message(
                f"`{self.name}`{held} has no value after a step: {whose} forward did not run",
                why="a step runs a graph, which gives what the forward returns and the new values "
                "of buffers",
                help=(
                    "add it to the loss in the forward, or return it with the outputs:  "
                    "return output, value",
                    "or hold it in a buffer, to look at it:  "
                    f"self.register_buffer('{names[-1]}', torch.zeros(()))",
                ),
            )
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
    """A batch differs from the one that was captured. what: e.g. "dtype of input_ids"."""

    code = "GA406"
    what: str
    expected: str
    got: str

    def message(self) -> Message:
        if self.what.startswith("dtype"):
            advice = f"convert it before the call:  x = x.to({self.expected})"
        elif self.what.startswith("shape"):
            advice = f"the model does not run with it: give it the shape {self.expected}"
        else:
            advice = (
                "call the model with the same inputs in every training step, and with others "
                "under torch.no_grad()"
            )
        return Message(
            f"{self.what} changed: captured with {self.expected}, now {self.got}",
            why="the graph and the plan hold for batches like the captured one only",
            help=(advice,),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class GraphMisuse(GraphAccelError):
    """The optimized model was used in a way its graph does not allow. what: a whole sentence.
    other_help: a second way out. location: the line of the model that this is about."""

    code = "GA407"
    what: str
    help_line: str = ""
    other_help: str = ""
    location: Location | None = None

    def message(self) -> Message:
        lines = tuple(line for line in (self.help_line, self.other_help) if line)
        return Message(self.what, location=self.location, help=lines)


@dataclass(kw_only=True, eq=False, repr=False)
class PartOfModel(GraphAccelError):
    """A file would have contained only the part of a model that one process holds. what: which
    object. of_optimizer: it is the state of one. loaded: one of all parameters loads it."""

    code = "GA411"
    what: str
    of_optimizer: bool = False
    loaded: bool = False

    def message(self) -> Message:
        together = "graphaccel.save('checkpoints', model, optimizer, step=100)"
        helps = (
            "have the whole, on every process:  state = graphaccel.full_state_dict(model)",
            "and write it on one of them:  torch.save(state, 'model.pt')",
            "or, of transformers:  model.save_pretrained('folder', state_dict=state)",
            f"or each process its part:  {together}",
            "to read a file of the whole model:  graphaccel.load('model.safetensors', model)",
        )
        harm = "a file of those would load as another model"
        if self.of_optimizer:
            harm = harm.replace("model", "state")
            helps = (
                f"save it with the model, each process its part:  {together}",
                "which any plan reads:  graphaccel.load('checkpoints', model, optimizer)",
                "or keep all of it on each process:  "
                "graphaccel.optimize(model, optimizer, zero=0, tensor=1, pipeline=1)",
            )
        if self.loaded:
            harm = "the rest would start anew"
        done = "loaded" if self.loaded else "saved"
        return Message(
            f"{self.what} can not be {done} by one process: others have parts of it",
            why=f"under this plan each process has some of the numbers only, and {harm}",
            help=helps,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ElsewhereNeeded(GraphAccelError):
    """An op needs the values of a tensor of another pipeline rank. op: its name. optimizer: the
    class of the optimizer whose step it is in, if it is."""

    code = "GA408"
    op: str
    location: Location | None = None
    optimizer: str = ""

    def message(self) -> Message:
        op, why = self.op, "a process holds the stages that it runs, and the others hold the rest"
        helps = (
            "bring all of them here first:  state = graphaccel.full_state_dict(model)",
            "or make averages and copies of the model when it has its plan:  "
            "graphaccel.optimize(model, optimizer, example_batch=batch)",
        )
        if op == "item":
            helps = (
                "numbers of all of them are read together:  "
                "norms = torch.stack([p.grad.norm() for p in model.parameters()]).tolist()",
                "or bring all of them here first:  state = graphaccel.full_state_dict(model)",
            )
        if op == "equal":
            helps = (
                "whether both are one parameter does not depend on values:  one is other",
                "to give an optimizer what it does not have yet:  "
                "optimizer.add_param_group({'params': list(layer.parameters())})",
            )
        if self.optimizer:
            op = f"{self.optimizer}.step"
            why += f"; {self.optimizer} computes with all parameters at once"
            helps = (
                "train with one that updates each by itself:  "
                "optimizer = torch.optim.AdamW(model.parameters())",
                "or give each process the whole model:  "
                "graphaccel.optimize(model, optimizer, pipeline=1)",
            )
        return Message(
            f"`{op}` needs the values of a parameter that is on another pipeline rank",
            location=self.location,
            why=why,
            help=helps,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NotAlone(GraphAccelError):
    """This process belongs to a job of several processes, but its rank is not known.

    variable: the evidence, as in a shell. reason: what is missing. command: starts it correctly.
    alone: what trains in one process.
    """

    code = "GA409"
    variable: str
    reason: str
    command: str
    alone: str = "graphaccel.optimize(model, optimizer, devices=1)"

    def message(self) -> Message:
        return Message(
            f"{self.variable} says that this job has several processes, and {self.reason}",
            why="each of them would train a model of its own",
            help=(
                f"start them so:  {self.command}",
                f"or train in this process alone:  {self.alone}",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class NoMeeting(GraphAccelError):
    """The processes of a job can not connect to each other before they begin.

    place: HOST:PORT, or empty where nothing names it. cause: in words. command: an example.
    """

    code = "GA419"
    place: str
    cause: str
    command: str

    def message(self) -> Message:
        where = f" at {self.place}" if self.place else ""
        return Message(
            f"the processes of this job can not meet{where}: {self.cause}",
            why="before training starts every process connects to a port of the first machine",
            help=(
                "name a machine that all of them reach, and a port that is free on it:  "
                f"{self.command}",
            ),
        )


@dataclass(kw_only=True, eq=False, repr=False)
class WrappedModel(GraphAccelError):
    """Another system wraps the model or a part of it. what: a whole sentence."""

    code = "GA410"
    what: str
    why: str
    help_line: str
    location: Location | None = None

    def message(self) -> Message:
        return Message(self.what, location=self.location, why=self.why, help=(self.help_line,))
