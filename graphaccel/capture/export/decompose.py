"""Decompose an exported forward to functional ATen calls without in-place writes.

exported                                              after
  %r: f32[8,4] = aten.reshape.default(%x, [8, 4])       %v: f32[8,4] = aten.view.default(%x, [8, 4])
  %d: f32[8,4] = aten.dropout.default(%r, 0.0, True)    %c: f32[8,4] = aten.clone.default(%v)
  %y: f32[8,4] = aten.linear.default(%d, %w)            %y: f32[8,4] = aten.linear.default(%c, %w)

Export records calls before autograd sees them. Ops that may return their input, or a view of it,
are decomposed here, what is written in place becomes a new value, and regions without gradients are
inlined: the result of `ExportedProgram.run_decompositions({})`, in a tenth of its time, since no
call runs twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import traceback as fx_traceback

from graphaccel.capture.trace import Answers, NotTraced, Tracing
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.functional import (
    as_functional,
    behind,
    below_functionalization,
    functionalized,
)
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.compat.torch.modes import without_modes
from graphaccel.compat.torch.ops import (
    grad_region,
    is_composite,
    is_preservable_composite,
    writes_beyond_schema,
    written_arguments,
)
from graphaccel.compat.torch.tensors import storage_key

aten = torch.ops.aten
_OP = type(aten.add.Tensor)


@dataclass(frozen=True)
class Exported:
    """A forward as exported: its graph, the specs of its placeholders and results, and
    constants."""

    graph_module: fx.GraphModule = field(repr=False)
    graph_signature: Any = field(repr=False)
    constants: dict[str, Any] = field(repr=False)


def decomposed(program: Any, answers: Answers | None = None) -> Exported:
    """The functional form of an exported program: by one trace, or by torch where that fails.

    answers: cached results of calls, shared with other traces.
    """
    try:
        graph, written = _functional(program.graph_module, {} if answers is None else answers)
        signature = _with_written(program.graph_signature, written, graph)
    except NotTraced:
        program = program.run_decompositions({})
        graph, signature = program.graph_module, program.graph_signature
    return Exported(graph, signature, program.constants)


def _with_written(signature: Any, written: list[str], graph: fx.GraphModule) -> Any:
    """The signature of a graph that returns first the new values of these inputs.

    Raises NotTraced for an input that is no buffer.
    """
    results: Any = graph.graph.output_node().args[0]
    specs = []
    for place, result in zip(written, results, strict=False):
        if place not in signature.inputs_to_buffers:
            raise NotTraced(f"{place} is written")
        name = signature.inputs_to_buffers[place]
        specs.append(OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(result.name), name))
    return replace(signature, output_specs=[*specs, *signature.output_specs])


def _functional(exported: fx.GraphModule, answers: Answers) -> tuple[fx.GraphModule, list[str]]:
    """The graph, and the names of the inputs whose new values are its first results.

    Raises NotTraced where a call is not an ATen op, or writes where its schema does not say so.
    """
    places = exported.graph.find_nodes(op="placeholder")
    tracing = Tracing(fake_mode_of(places), answers)
    values = [_value(node) for node in places]
    with without_modes(), torch.no_grad(), fx_traceback.preserve_node_meta():
        for node, value in zip(places, values, strict=True):
            if isinstance(value, torch.Tensor):
                tracing.take(value, node.name)
            else:
                tracing.graph.placeholder(node.name)
        with tracing, functionalized():
            given = [as_functional(value) for value in values]
            results = _Calls(exported, tracing).run(*given)
            new = [behind(value) for value in given]
            written = [i for i, value in enumerate(new) if value is not values[i]]
            _refuse_shared([values[i] for i in written], values)
            results = [new[i] for i in written] + [behind(result) for result in results]
    tracing.graph.output(tuple(tracing.known(result).node for result in results))
    for node in tracing.graph.nodes:
        if written_arguments(node) or writes_beyond_schema(node.target):
            raise NotTraced(f"{node.target} writes")
    tracing.graph.eliminate_dead_code()
    return graph_module(torch.nn.Module(), tracing.graph), [places[i].name for i in written]


def _refuse_shared(written: list[Any], values: list[Any]) -> None:
    """Raises NotTraced where another input has the memory of one that is written."""
    storages = [storage_key(v) for v in values if isinstance(v, torch.Tensor)]
    if any(storages.count(storage_key(value)) > 1 for value in written):
        raise NotTraced("an input that shares its memory is written")


def _value(place: fx.Node) -> Any:
    """What stands for an input: a constant of the model too is a tensor of unknown values here, and
    a call that reads its values is not traced."""
    value: Any = place.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    value.constant = None  # type: ignore[attr-defined]
    return value


class _Calls(fx.Interpreter):
    """Runs an exported graph and sends its calls to `tracing`."""

    def __init__(self, graph: fx.GraphModule, tracing: Tracing) -> None:
        super().__init__(graph)
        self._tracing = tracing

    def run_node(self, n: fx.Node) -> Any:
        region = grad_region(n)
        if region is None:
            return super().run_node(n)
        _, name, inputs = region
        given = [self.env[node] for node in inputs]
        return _Calls(getattr(self.module, name), self._tracing).run(*given)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        if target is aten._assert_tensor_metadata.default:
            return None
        if not isinstance(target, _OP) or target.namespace != "aten":
            raise NotTraced(f"{target}")
        if target is aten.batch_norm.default:
            return _batch_norm(*args, **kwargs)
        if target is aten.broadcast_tensors.default:
            return _broadcast(*args)
        if target is aten.stft.default:
            return _stft(*args, **kwargs)
        if torch.Tag.view_copy in target.tags and target is not aten.lift_fresh_copy.default:
            return _copy_of_view(target, args, kwargs)
        if is_preservable_composite(target):
            args, kwargs = pytree.tree_map(behind, (args, kwargs))
            with without_modes(), below_functionalization():
                whole = self._tracing.call(target, args, kwargs, whole=True)
            return pytree.tree_map(as_functional, whole)
        return _called(target, args, kwargs)


def _called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target.decompose(*args, **kwargs) if is_composite(target) else target(*args, **kwargs)


def _copy_of_view(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`aten.permute_copy` and the like, as a copy of what the op that returns a view returns: that
    one has a sharding rule."""
    _, name, overload = str(target).split(".")
    view = getattr(getattr(aten, name.removesuffix("_copy")), overload)
    return pytree.tree_map(torch.clone, _called(view, args, kwargs))


def _broadcast(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`aten.broadcast_tensors`, with which torch's losses begin, as no call where shapes are equal:
    one op may not return what it reads."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return [t if t.shape == shape else t.expand(shape) for t in tensors]


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *settings: Any,
) -> torch.Tensor:
    """`aten.batch_norm` by the ops whose schemas say that running statistics are written: those
    which torch's own decomposition of `aten.native_batch_norm` says.

    On a GPU, too, where torch would call `aten.cudnn_batch_norm`, which no rule and no pass knows.
    Raises NotTraced for a tensor without elements.
    """
    *momentum_and_eps, _ = settings
    if x.numel() == 0:
        raise NotTraced("a batch norm of nothing")
    if mean is None and variance is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, *momentum_and_eps)[
            0
        ]
    given = x, weight, bias, mean, variance
    if training:
        return aten._native_batch_norm_legit.default(*given, training, *momentum_and_eps)[0]
    return aten._native_batch_norm_legit_no_training.default(*given, *momentum_and_eps)[0]


def _stft(
    x: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    """`aten.stft`, [.., L] → [.., frequencies, frames], by ops that have sharding rules: torch's
    own takes the frames by strides, and adds their gradients up by places in memory.

    Raises NotTraced for a result without complex numbers, which is deprecated, and for frames that
    are aligned with the window.
    """
    if align_to_window or not return_complex:
        raise NotTraced("an older form of stft")
    width = n_fft if win_length is None else win_length
    frames = x.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length)
    if window is None and width < n_fft:
        window = x.new_ones(width)
    if window is not None:
        left = (n_fft - width) // 2
        frames = frames * torch.nn.functional.pad(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else "backward"
    half = not frames.is_complex() if onesided is None else onesided
    return (torch.fft.rfft if half else torch.fft.fft)(frames, norm=norm).transpose(-1, -2)
