"""Derive the step of a model in evaluation mode from its captured training step.

Exact where the forward in evaluation mode calls the same torch functions on the same tensors, and
no dropout is active (`capture.state.torch_calls`): dropout becomes a copy, and batch norm uses its
running statistics and leaves them as they are. Any other forward is captured anew.

before                                            after
  %d: (f32[4,8], b8[4,8]) = aten.native_dropout(%x, 0.1, True)   %c: f32[4,8] = aten.clone(%x)
  %g: f32[4,8] = getitem(%d, 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import ForwardGraph, LossFn
from graphaccel.capture.layers.runs import prove_repeats, shortened
from graphaccel.capture.state.torch_calls import TorchCalls, torch_calls
from graphaccel.capture.stepgraph import StepGraph, assemble, of_few
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.replication.layers import KEPT, NotRepeated

_aten = torch.ops.aten
_DROPOUT = _aten.native_dropout.default
_ATTENTION = _aten.scaled_dot_product_attention.default
_TRAINED_NORM = _aten._native_batch_norm_legit_functional.default
_NORM = _aten._native_batch_norm_legit_no_training.default
_RATE = 4
"""The place of `dropout_p` among the arguments of attention."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def evaluation_step(
    step: StepGraph,
    built: Callable[[bool], tuple[nn.Module, Batch]],
    loss_fn: LossFn,
    *,
    symbolic: bool = True,
) -> StepGraph | None:
    """The step in evaluation mode; None where it is not the training step without dropout,
    normalised by running statistics.

    symbolic: whether it serves other sizes of the batch; a step for its own takes half the time.
    built: called with whether it is to train, returns the fake model, always with the same
      parameters, and a fake batch of the sizes that the step was captured with.
    """
    runs = () if step.repeats is None else step.repeats.runs
    records: list[TorchCalls | None] = []
    _, batch = built(True)
    for training in (True, False):
        model, _ = built(training)
        few = shortened(model, dict.fromkeys(runs, KEPT)) if runs else model
        records.append(torch_calls(few, batch, loss_fn))
    trained, evaluated = records
    if trained is None or evaluated is None or not evaluated.same_but_mode(trained):
        return None
    short = step if step.repeats is None else step.repeats.short
    forwards = (short.forward, *(other for _, _, other in short.others))
    if not all(_is_of(forward, trained) for forward in forwards):
        return None
    try:
        if runs:
            prove_repeats(model, batch, loss_fn, runs, KEPT)
    except NotRepeated:
        return None
    answers: Answers = {}
    derived = of_few(step, lambda one: _evaluated(one, answers, symbolic))
    return replace(derived, training=False)


def _evaluated(step: StepGraph, answers: Answers, symbolic: bool) -> StepGraph:
    others = step.others if symbolic else ()
    return assemble(
        in_evaluation(step.forward),
        tuple((symbol, size, in_evaluation(other)) for symbol, size, other in others),
        step.sizes if symbolic else {},
        step.batch_dims,
        step.tied,
        step.trainable,
        False,
        answers=answers,
    )


def _is_of(forward: ForwardGraph, calls: TorchCalls) -> bool:
    """Whether what depends on the mode in a graph is what these calls are."""
    nodes = list(forward.graph.graph.nodes)
    drops = sum(_rate(node) > 0 for node in nodes)
    norms = sum(node.target is _TRAINED_NORM for node in nodes)
    written = [output.name for output in forward.outputs if output.kind == "buffer"]
    statistics = all(name.rpartition(".")[2] in _STATISTICS for name in written)
    return (drops, norms) == (calls.drops, calls.norms) and statistics


def _rate(node: fx.Node) -> float:
    """Which part of its values a node drops."""
    if node.target is _DROPOUT:
        rate: Any = node.args[1]
    elif node.target is _ATTENTION:
        named = node.kwargs.get("dropout_p", 0.0)
        rate = node.args[_RATE] if len(node.args) > _RATE else named
    else:
        rate = 0.0
    return rate


def in_evaluation(forward: ForwardGraph) -> ForwardGraph:
    """The forward graph of the same calls in evaluation mode."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(forward.graph.graph, {})
    pairs = list(zip(results, forward.outputs, strict=True))
    kept = [pair for pair in pairs if pair[1].kind != "buffer"]
    output = graph.output(tuple(node for node, _ in kept))
    output.meta = dict(forward.graph.graph.output_node().meta)
    with fake_mode_of(list(graph.nodes)):
        for node in list(graph.nodes):
            _switch(graph, node)
    _drop_unused(graph)
    graph.lint()
    outputs = tuple(spec for _, spec in kept)
    return replace(forward, graph=graph_module(forward.graph, graph), outputs=outputs)


def _switch(graph: fx.Graph, node: fx.Node) -> None:
    """What a node is in evaluation mode."""
    if node.target is _DROPOUT:
        for user in _first_results(node):
            with graph.inserting_before(user):
                same = graph.call_function(_aten.clone.default, (node.args[0],))
            same.meta = dict(user.meta)
            user.replace_all_uses_with(same)
    elif node.target is _ATTENTION and _rate(node) > 0:
        if len(node.args) > _RATE:
            node.update_arg(_RATE, 0.0)
        else:
            node.update_kwarg("dropout_p", 0.0)
    elif node.target is _TRAINED_NORM:
        x, weight, bias, mean, variance, _, momentum, epsilon = node.args
        with graph.inserting_before(node):
            norm = graph.call_function(_NORM, (x, weight, bias, mean, variance, momentum, epsilon))
        norm.meta = dict(node.meta)
        norm.meta["val"] = _NORM(*(_value(each) for each in norm.args))
        for user in _first_results(node):
            user.replace_input_with(node, norm)


def _first_results(node: fx.Node) -> Iterator[fx.Node]:
    return (user for user in list(node.users) if user.args[1] == 0)


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _drop_unused(graph: fx.Graph) -> None:
    """Remove what nothing reads any more; inputs stay."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
