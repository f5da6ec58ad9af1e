"""Export the forward pass *with its loss* to a functional ATen graph, by `torch.export`.

Non-strict `torch.export` is the public interface: it keeps the module path and the source line of
every node and names inputs, parameters, buffers and outputs. No weights are read: real, fake and
meta parameters can all be captured.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch, CallNumber
from graphaccel.capture.export.assigned import written_in_place
from graphaccel.capture.export.decompose import Exported, decomposed
from graphaccel.capture.export.expert_loops import batched_experts
from graphaccel.capture.export.explain import (
    explained,
    refuse_higher_order,
    refuse_lookups,
    refuse_unplannable,
    refuse_writes,
)
from graphaccel.capture.export.no_grad import detach_regions
from graphaccel.capture.export.one_name import one_name_each
from graphaccel.capture.export.outputs import UnseenOutput, flatten_output, is_plain
from graphaccel.capture.export.python_function import put_back
from graphaccel.capture.export.reports import without_reports
from graphaccel.capture.export.watch import INSIDE, Watch
from graphaccel.capture.export.weights import Weights
from graphaccel.capture.state.caches import caches_of, forget_traced, restore_buffers
from graphaccel.capture.state.draws import generators_restored
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.asserted import assertions_passed, distributions_unchecked
from graphaccel.compat.torch.export import (
    causal_masks_as_given,
    inference_as_no_grad,
    keywords_as_names,
    not_compiling,
    parametrizations_computed,
    questions_whether_compiling,
)
from graphaccel.compat.torch.graphs import compiled_when_called, graph_module
from graphaccel.errors import GraphAccelError
from graphaccel.guards.attributes import values_on
from graphaccel.guards.effects import output_dropped

OUTSIDE = "outside"
"""Given instead of a loss function: the script computes the loss, whatever the model returns."""

LossFn: TypeAlias = Callable[..., torch.Tensor] | Literal["outside"] | None

_NUMBERS = "graphaccel_numbers"
"""The keyword argument that passes numbers of the model to its forward, as tensors."""


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
    """What the model returned: its structure, and its leaves.

    leaves: the loss is at position `loss_leaf`; the value of a tensor leaf is a graph output; any
    other leaf (a cache object, a number, None) is stored as it was at capture.
    tracked: leaves besides the loss that require a gradient in the model. orders: of a tensor leaf
    its dims in the order of memory, outermost first; the script may call `view` on it.
    """

    spec: Any = field(repr=False)
    loss_leaf: int | None
    tensor_leaves: tuple[int, ...]
    plain: Mapping[int, Any] = field(repr=False)
    num_leaves: int
    tracked: frozenset[int] = frozenset()
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardGraph:
    """The forward pass as one functional graph: placeholders in the order of `inputs`.

    constants: tensors that the forward reads besides parameters, buffers and batch, by the name of
      their input. attributes: of constants that an attribute of the model holds, name → path, as
      `capture.state.closures.read_attribute` reads it ("blocks.0.table").
    """

    graph: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    constants: Mapping[str, torch.Tensor]
    returned: Returned
    attributes: Mapping[str, str] = field(default_factory=dict)


class _WithLoss(nn.Module):
    """The user's model, returning its loss first, then every other tensor it returns."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        note: Callable[[Returned], None],
        watch: Watch | None = None,
        numbers: Callable[..., AbstractContextManager[None]] | None = None,
        rebuild: Callable[..., Any] | None = None,
    ) -> None:
        """rebuild: (args, kwargs) of the leaves that `forward` is called with instead."""
        super().__init__()
        self.model = model
        self._watch, self._numbers, self._rebuild = watch, numbers, rebuild
        self._caches = caches_of(model)
        held = {n: on for n, t in _tensors(model) if (on := values_on(t))}
        self.__dict__["_on_tensors"] = held
        self.__dict__["_loss_fn"] = loss_fn  # not a submodule, even if it is a module
        self._note = note  # called: export restores attributes that forward writes

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        forget_traced(self._caches)
        held = self.__dict__["_on_tensors"]
        for name, tensor in _tensors(self.model) if held else ():
            vars(tensor).update(held.get(name, {}))  # export puts others in their place
        around = nullcontext() if self._watch is None else self._watch.around((args, kwargs))
        state = kwargs.pop(_NUMBERS, ())
        numbers = nullcontext() if self._numbers is None else self._numbers(state)
        with (
            inference_as_no_grad(),
            causal_masks_as_given(),
            parametrizations_computed(),
            assertions_passed(INSIDE),
            distributions_unchecked(),
            output_dropped(),
            around,
            numbers,
            written_in_place(self.model),
        ):
            if self._rebuild is not None:
                args, kwargs = self._rebuild(args)  # with the numbers of the call
            if not callable(self._loss_fn):
                output = self._called(args, kwargs)
            else:
                args, kwargs, targets = split_targets(self._loss_fn, args, kwargs)
                output = self._loss_fn(self._called(args, kwargs), *targets)
        leaves, spec = flatten_output(output)
        loss = None if self._loss_fn == OUTSIDE else find_loss(output)
        result = (i for i, x in enumerate(leaves) if x is loss)
        position = None if loss is None else next(result, None)
        unseen = loss is not None and position is None
        if unseen or not any(x is None or isinstance(x, torch.Tensor) for x in leaves):
            raise UnseenOutput(type(output).__name__, "the loss" if unseen else "a tensor")
        tensors = tuple(
            i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and i != position
        )
        plain = {i: x for i, x in enumerate(leaves) if is_plain(x)}
        tracked = frozenset(i for i in tensors if leaves[i].requires_grad)
        orders = {i: _dim_order(leaves[i]) for i in tensors}
        self._note(Returned(spec, position, tensors, plain, len(leaves), tracked, orders))
        marks = () if self._watch is None else self._watch.finish(leaves)
        if position is None:
            return (*(leaves[i] for i in tensors), *marks)
        # Only the loss is differentiated: export would differentiate an undetached output too.
        return (loss, *(leaves[i].detach() for i in tensors), *marks)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward with its hooks. A `__call__` of the model's class runs around each step, as
        the script calls it."""
        return nn.Module.__call__(self.model, *args, **kwargs)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from nn.Module.named_parameters(model, remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def with_loss(
    model: nn.Module, loss_fn: LossFn, note: Callable[[Returned], None] = lambda _: None
) -> nn.Module:
    """The model, in its current mode, returning its loss first and then all other tensors. note:
    called with the structure of what it returned."""
    wrapper = _WithLoss(model, loss_fn, note)
    wrapper.training = model.training
    return wrapper


def split_targets(
    loss_fn: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Split the batch into the model's arguments and the loss function's.

    `loss_fn(output, target, ...)`: each parameter after the first is taken from the batch by
    keyword, else from the end of the positional arguments. If it is a module, its forward's
    parameters count.
    """
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    wanted = [
        p.name
        for p in inspect.signature(called).parameters.values()
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


def export_forward(
    model: nn.Module, batch: Batch, loss_fn: LossFn, answers: Answers | None = None
) -> ForwardGraph:
    """Export `model` on `batch` in its current mode (training or evaluation).

    answers: cached results of calls, shared with other traces of this model.

    Raises:
        TensorBranch: the model branches on the value of a tensor (GA101).
        UnregisteredWeight: it reads a weight that is not registered in the model (GA105).
        CaptureRefused: anything else that has no graph (GA102), with the user's own line.
    """
    with questions_whether_compiling() as asked:
        try:
            return _exported(model, batch, loss_fn, answers)
        except GraphAccelError as error:
            if not any(asked):
                raise
            first = error
    # The model branches on whether it is traced: code that leaves out what eager mode does (a
    # default mask) may fail only here.
    try:
        with not_compiling():
            return _exported(model, batch, loss_fn, answers)
    except GraphAccelError as second:
        # An error of Python's is one that eager code does not reach; the second is in its way.
        missed = isinstance(first.__cause__, (TypeError, AttributeError, NameError))
        error = second if missed else first
        raise error from error.__cause__


def _exported(
    model: nn.Module, batch: Batch, loss_fn: LossFn, answers: Answers | None
) -> ForwardGraph:
    notes: list[Returned] = []
    weights = Weights(model, loss_fn)
    watch = Watch(model, weights)
    rebuild = batch.rebuild if batch.has_objects else None  # export knows what pytree knows
    wrapper = _WithLoss(model, loss_fn, notes.append, watch, batch.numbers, rebuild)
    wrapper.training = model.training
    args, kwargs = batch.rebuild(batch.leaves)
    if rebuild is not None:
        given = batch.leaves[: batch.spec.num_leaves]
        args, kwargs = tuple(None if isinstance(x, CallNumber) else x for x in given), {}
    if batch.numbers is not None:
        kwargs[_NUMBERS] = batch.state
    with (
        _state_restored(model),
        generators_restored(),
        batched_experts(model),
        one_name_each(model),
        keywords_as_names(),
        warnings.catch_warnings(),
        without_reports(),
        watch.reading(),
    ):
        warnings.simplefilter("ignore")
        program = None
        try:
            with compiled_when_called():
                program = torch.export.export(wrapper, args, kwargs, strict=False)
            watch.refuse_lost(program)
            weights.join(program)
            refuse_lookups(program.graph_module, model)
            detach_regions(program.graph_module, _trained(program, model))
            program = decomposed(program, answers)
            put_back(program.graph_module, watch.calls)
        except Exception as error:  # every failure of export is translated, with its cause
            if program is not None:  # of a later pass, whose text names no line of the user's
                refuse_unplannable(program.graph_module.graph, model)
            raise explained(watch.cause(error), model, weights) from error
    refuse_higher_order(program.graph_module.graph, model)
    refuse_unplannable(program.graph_module.graph, model)
    refuse_writes(program, batch, model)
    forward = _unpack(program, batch, notes[-1])
    return replace(forward, attributes=weights.attributes(forward.constants))


def _trained(program: Any, model: nn.Module) -> dict[str, str]:
    """Placeholders of parameters that require a gradient → their names."""
    wanted = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    names = program.graph_signature.inputs_to_parameters
    return {place: own for place, name in names.items() if (own := _own(name)) in wanted}


def _unpack(program: Exported, batch: Batch, returned: Returned) -> ForwardGraph:
    signature = program.graph_signature
    parameters = signature.inputs_to_parameters
    buffers = signature.inputs_to_buffers
    constants = signature.inputs_to_lifted_tensor_constants
    mutated = {**signature.buffers_to_mutate, **signature.parameters_to_mutate}
    written = set(mutated.values())
    leaves = iter(range(len(batch.leaves)))
    inputs: list[GraphInput] = []
    graph = graph_module(program.graph_module, program.graph_module.graph)
    for node in list(graph.graph.nodes):
        if node.op != "placeholder":
            continue
        if node.name in parameters:
            name = parameters[node.name]
            kind = "buffer" if name in written else "parameter"  # a frozen one that is updated
            inputs.append(GraphInput(kind, _own(name)))
        elif node.name in buffers:
            inputs.append(GraphInput("buffer", _own(buffers[node.name])))
        elif node.name in constants:
            if not node.users:  # a parameter that was reached another way
                graph.graph.erase_node(node)
                continue
            inputs.append(GraphInput("constant", constants[node.name]))
        else:
            leaf = next(leaves)
            given = batch.leaves[leaf]
            if isinstance(given, torch.Tensor):
                spec = GraphInput("batch", batch.names[leaf], leaf, given.requires_grad)
                inputs.append(spec)
            else:  # flags and None: constants in the graph, another value is another call
                graph.graph.erase_node(node)
    outputs: list[GraphOutput] = []
    tensor_leaves = iter(returned.tensor_leaves)
    loss_due = returned.loss_leaf is not None
    returned_nodes: Any = graph.graph.output_node().args[0]
    for spec in signature.output_specs[: len(returned_nodes)]:
        name = spec.arg.name
        if name in mutated and len(outputs) < len(mutated):
            outputs.append(GraphOutput("buffer", _own(mutated[name])))
        elif loss_due:
            outputs.append(GraphOutput("loss", leaf=returned.loss_leaf or 0))
            loss_due = False
        else:
            outputs.append(GraphOutput("output", leaf=next(tensor_leaves)))
    used = [spec.name for spec in inputs if spec.kind == "constant"]
    values = {name: program.constants[name] for name in used}
    return ForwardGraph(graph, tuple(inputs), tuple(outputs), values, returned)


def _own(name: str) -> str:
    """The name in the user's model of the wrapper's `model.<name>`."""
    return name.removeprefix("model.")


def _dim_order(tensor: torch.Tensor) -> tuple[int, ...]:
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's own attributes afterwards: export runs the user's Python. A buffer that
    the forward makes itself (a table, at its first use) is made in each trace."""
    before = {module: (module.training, dict(module._buffers)) for module in model.modules()}
    try:
        yield
    finally:
        for module, (training, buffers) in before.items():
            module.training = training
            restore_buffers(module, buffers)
