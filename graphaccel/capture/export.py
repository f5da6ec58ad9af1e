"""Export the forward pass *with its loss* to a functional ATen graph.

`torch.export` (non-strict) is the public route: it keeps the module path and the source line of
every node and gives inputs, parameters, buffers and outputs by name. No weights are read: real,
fake and meta parameters capture alike.
"""

from __future__ import annotations

import inspect
import io
import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.no_grad import WrittenWithoutGrad, detach_regions
from graphaccel.compat.torch import (
    DataDependentError,
    causal_masks_as_given,
    graph_module,
    inference_as_no_grad,
    is_known,
    pytree,
)
from graphaccel.errors import CaptureRefused, TensorBranch
from graphaccel.messages import Location

OUTSIDE = "outside"
"""In the place of a loss function: the script computes the loss, whatever the model returns."""

LossFn: TypeAlias = Callable[..., torch.Tensor] | Literal["outside"] | None

_SAME_EXPERTS = {"eager", "grouped_mm"}

_INSIDE = (f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""Where the frames of torch and of graphaccel lie: they are not the user's."""


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph.

    kind: "parameter", "buffer", "constant" or "batch"; of joint graphs also "tangent" and "scale".
    name: the parameter's or buffer's name in the model; the batch leaf's readable name.
    leaf: position among the batch's leaves (of a tangent: among the output's).
    tracked: a batch leaf that requires a gradient.
    """

    kind: str
    name: str
    leaf: int = -1
    tracked: bool = False


@dataclass(frozen=True)
class GraphOutput:
    """One output of a captured graph.

    kind: "loss", "gradient" (of parameter `name`), "input_gradient" (of batch leaf `leaf`),
    "buffer" (new value of buffer `name`), "output" (leaf number `leaf` of what the model returned).
    """

    kind: str
    name: str = ""
    leaf: int = -1


@dataclass(frozen=True)
class Returned:
    """What the model returned: its structure, and for each leaf what it was.

    leaves: the position of the loss is `loss_leaf`; a tensor leaf has its value as graph output;
    any other leaf (a cache object, a number, None) is kept as it was at capture.
    tracked: leaves besides the loss that require a gradient in the model.
    """

    spec: Any = field(repr=False)
    loss_leaf: int | None
    tensor_leaves: tuple[int, ...]
    plain: Mapping[int, Any] = field(repr=False)
    num_leaves: int
    tracked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ForwardGraph:
    """The forward pass as one functional graph: placeholders in the order of `inputs`."""

    graph: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    constants: Mapping[str, torch.Tensor]
    returned: Returned


class _WithLoss(nn.Module):
    """The user's model, returning its loss first, then every other tensor it returns."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        note: Callable[[Returned], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._note = note  # a call: export undoes what forward writes to attributes

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        with inference_as_no_grad(), causal_masks_as_given():
            if not callable(self._loss_fn):
                output = self.model(*args, **kwargs)
            else:
                args, kwargs, targets = split_targets(self._loss_fn, args, kwargs)
                output = self._loss_fn(self.model(*args, **kwargs), *targets)
        leaves, spec = _flatten_output(output)
        loss = None if self._loss_fn == OUTSIDE else find_loss(output)
        position = None if loss is None else next(i for i, x in enumerate(leaves) if x is loss)
        tensors = tuple(
            i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and i != position
        )
        plain = {
            i: x
            for i, x in enumerate(leaves)
            if not isinstance(x, torch.Tensor)
            and isinstance(x, (int, float, str, bool, type(None)))
        }
        tracked = frozenset(i for i in tensors if leaves[i].requires_grad)
        self._note(Returned(spec, position, tensors, plain, len(leaves), tracked))
        if position is None:
            return tuple(leaves[i] for i in tensors)
        # Only the loss is differentiated: an undetached output would want a gradient of its own.
        return (loss, *(leaves[i].detach() for i in tensors))


def with_loss(model: nn.Module, loss_fn: LossFn) -> nn.Module:
    """The model, in its present mode, returning its loss first and then all other tensors."""
    wrapper = _WithLoss(model, loss_fn, lambda _: None)
    wrapper.training = model.training
    return wrapper


def split_targets(
    loss_fn: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Which part of the batch is the model's and which is the loss function's.

    `loss_fn(output, target, ...)`: each parameter after the first is taken from the batch by
    keyword, else from the end of the positional arguments.
    """
    wanted = [
        p.name
        for p in inspect.signature(loss_fn).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ][1:]
    if "target" not in wanted and not wanted:
        return args, kwargs, ()
    kwargs = dict(kwargs)
    if all(name in kwargs for name in wanted):
        return args, kwargs, tuple(kwargs.pop(name) for name in wanted)
    count = len(wanted)
    return args[: len(args) - count], kwargs, tuple(args[len(args) - count :])


def find_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned: `.loss`, `["loss"]`, or a returned differentiable
    scalar."""

    def scalar(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()

    named: Any = (
        output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    )
    if scalar(named):
        return named
    if isinstance(output, torch.Tensor) and scalar(output):
        return output
    if isinstance(output, (tuple, list)):
        scalars = [x for x in output if scalar(x) and x.requires_grad]
        if len(scalars) == 1:
            return scalars[0]
    return None


def export_forward(model: nn.Module, batch: Batch, loss_fn: LossFn) -> ForwardGraph:
    """Export `model` on `batch` in its present mode (training or evaluation).

    Raises:
        TensorBranch: the model branches on the value of a tensor (GA101).
        CaptureRefused: anything else that has no graph (GA102), with the user's own line.
    """
    notes: list[Returned] = []
    wrapper = _WithLoss(model, loss_fn, notes.append)
    wrapper.training = model.training
    args, kwargs = batch.rebuild(batch.leaves)
    with _state_restored(model), _batched_experts(model), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(wrapper, args, kwargs, strict=False)
            detach_regions(program.graph_module, _trained(program, model))
            program = program.run_decompositions({})
        except Exception as error:  # every failure of export becomes one of ours, cause kept
            raise _explained(error, model) from error
    _refuse_unknown_shapes(program.graph_module.graph, model)
    return _unpack(program, batch, notes[-1])


def _trained(program: Any, model: nn.Module) -> set[str]:
    """Placeholders of parameters that require a gradient."""
    wanted = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = program.graph_signature.inputs_to_parameters
    return {place for place, name in names.items() if _own(name) in wanted}


def _unpack(program: Any, batch: Batch, returned: Returned) -> ForwardGraph:
    signature = program.graph_signature
    parameters = signature.inputs_to_parameters
    buffers = signature.inputs_to_buffers
    constants = signature.inputs_to_lifted_tensor_constants
    leaves = iter(range(len(batch.leaves)))
    inputs: list[GraphInput] = []
    graph = graph_module(program.graph_module, program.graph_module.graph)
    for node in list(graph.graph.nodes):
        if node.op != "placeholder":
            continue
        if node.name in parameters:
            inputs.append(GraphInput("parameter", _own(parameters[node.name])))
        elif node.name in buffers:
            inputs.append(GraphInput("buffer", _own(buffers[node.name])))
        elif node.name in constants:
            inputs.append(GraphInput("constant", constants[node.name]))
        else:
            leaf = next(leaves)
            given = batch.leaves[leaf]
            if isinstance(given, torch.Tensor):
                spec = GraphInput("batch", batch.names[leaf], leaf, given.requires_grad)
                inputs.append(spec)
            else:  # flags and None: export has written them in, and another value is another call
                graph.graph.erase_node(node)
    mutated = signature.buffers_to_mutate
    outputs: list[GraphOutput] = []
    tensor_leaves = iter(returned.tensor_leaves)
    loss_due = returned.loss_leaf is not None
    for name in (spec.arg.name for spec in signature.output_specs):
        if name in mutated and len(outputs) < len(mutated):
            outputs.append(GraphOutput("buffer", _own(mutated[name])))
        elif loss_due:
            outputs.append(GraphOutput("loss", leaf=returned.loss_leaf or 0))
            loss_due = False
        else:
            outputs.append(GraphOutput("output", leaf=next(tensor_leaves)))
    values = {n: program.constants[n] for n in constants.values()}
    return ForwardGraph(graph, tuple(inputs), tuple(outputs), values, returned)


def _own(name: str) -> str:
    """The name in the user's model of what the wrapper calls `model.<name>`."""
    return name.removeprefix("model.")


def _flatten_output(output: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(output)


@contextmanager
def _state_restored(model: nn.Module):
    """Export runs the user's Python: leave the model's own attributes as they were."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _batched_experts(model: nn.Module) -> Iterator[None]:
    """Hugging Face's models have several ways to run the same experts: one loops over those that
    were hit, which no graph can say, one sorts the whole batch. That with a shape of its own for
    every row is the one that can be captured and split; what runs is `kernels.experts`."""
    found = [m for m in model.modules() if hasattr(m, "set_experts_implementation")]
    before = [m.get_experts_implementation() for m in found]
    able = [(m, b) for m, b in zip(found, before, strict=True) if set(b.values()) & _SAME_EXPERTS]
    try:
        for module, _ in able:
            module.set_experts_implementation("batched_mm")
        yield
    finally:
        for module, said in able:
            module.set_experts_implementation(said)


@contextmanager
def _quiet() -> Iterator[None]:
    """Export logs its own account of a failure and prints the graph so far: our text replaces
    both."""
    if os.environ.get("GRAPHACCEL_TRACEBACK") == "full":
        yield
        return
    printed, threshold, graph = io.StringIO(), logging.root.manager.disable, None
    logging.disable(max(threshold, logging.ERROR))
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        graph = getattr(error.__cause__, "partial_fx_graph", None)
        raise
    finally:
        logging.disable(threshold)
        own = printed.getvalue()
        sys.stderr.write(own if graph is None else own.replace(f"{graph}\n", ""))


def _explained(error: Exception, model: nn.Module) -> Exception:
    frame = _user_frame(error)
    location = None if frame is None else _location(frame)
    where = _module_of(error, model)
    if isinstance(error, WrittenWithoutGrad):
        location = _line_of(error.stack_trace)
    if isinstance(error, DataDependentError):
        return TensorBranch(module=where, location=location, others=())
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    return CaptureRefused(module=where, location=location, reason=re.sub(r"\s+", " ", reason)[:300])


def _location(frame: traceback.FrameSummary) -> Location:
    """The line as the user wrote it, with the columns of the expression where Python knows them."""
    number = frame.lineno or 0
    text = linecache.getline(frame.filename, number).rstrip("\n")
    start, end = getattr(frame, "colno", None), getattr(frame, "end_colno", None)
    several = getattr(frame, "end_lineno", number) != number
    if start is None or end is None or several or "\t" in text:
        return Location(frame.filename, number, text)
    raw = text.encode()  # columns count bytes
    return Location(
        frame.filename, number, text, len(raw[:start].decode()), len(raw[:end].decode())
    )


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame outside torch and graphaccel; the user's own before a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(("<", *_INSIDE))]
    own = [f for f in own if "/site-packages/" not in f.filename] or own
    return own[-1] if own else None


def _module_of(error: BaseException, model: nn.Module) -> str:
    """`Class.method` of the innermost module of the user's that was running."""
    name = f"{type(model).__name__}.forward"
    step = error.__traceback__
    known = {type(module) for module in model.modules()}
    while step is not None:
        code = step.tb_frame.f_code
        owner = step.tb_frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if type(owner) in known and not code.co_filename.startswith(("<", *_INSIDE)):
            name = f"{type(owner).__name__}.{code.co_name}"
        step = step.tb_next
    return name


def _line_of(stack_trace: str) -> Location | None:
    """The innermost line outside torch of a node's own account."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', stack_trace)
    own = [(f, int(n)) for f, n in frames if not f.startswith(_INSIDE)]
    return Location(*own[-1]) if own else None


def _refuse_unknown_shapes(graph: fx.Graph, model: nn.Module) -> None:
    """Sizes that depend on the data (`x[x > 0]`) pass export, but can not be planned with."""
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        if all(isinstance(size, int) or is_known(size) for size in shape):
            continue
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        kind = str(stack[-1][1]).rsplit(".", 1)[-1] if len(stack) > 1 else type(model).__name__
        raise CaptureRefused(
            module=f"{kind}.forward",
            location=_line_of(node.meta.get("stack_trace") or ""),
            reason="the shape of its result depends on the values of a tensor; "
            "torch.where and masked sums keep the shape",
        )
