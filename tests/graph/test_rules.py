"""Every sharding rule, proved on random calls: computed whole, and by two shards."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.values import tensors_of
from graphaccel.rules import factories
from graphaccel.rules.notation import Notation, shape_of, tensor_arguments
from graphaccel.rules.table import RULES, rule_of
from tests.support.calls import Draw
from tests.support.ops import CASES

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
FACTORIES = factories.UNIFORM | factories.COUNTS
# The number of images among a group norm's arguments.
COUNTS_IMAGES = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}


def graph_of(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """The call as a node, with a placeholder per tensor; values in `meta["val"]`."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point() or value.any() or not value.dim():
            node = graph.placeholder(f"x{len(graph.nodes)}")
        else:  # zeros that a graph can see are zeros
            node = graph.call_function(aten.zeros.default, (list(value.shape),))
        node.meta["val"] = value
        return node

    args, kwargs = fx.node.map_aggregate((args, kwargs), placed)
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = computed(node, {})
    return node


def computed(
    node: fx.Node, tensors: dict[int, Tensor], shapes: dict[tuple, tuple] | None = None
) -> Any:
    """The call with the tensors at some positions replaced, and lists of sizes by other sizes."""
    position = -1

    def value(x: Any) -> Any:
        nonlocal position
        if not isinstance(x, fx.Node):
            return x
        position += 1
        return tensors.get(position, x.meta["val"])

    args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), value)
    if shapes:
        args = tuple(list(shapes.get(tuple(a), a)) if isinstance(a, list) else a for a in args)
        if (at := COUNTS_IMAGES.get(node.target)) is not None:
            args = (*args[:at], args[at] // 2, *args[at + 1 :])
    return node.target(*args, **kwargs)


def halves(value: Tensor, names: tuple[str, ...], index: str) -> list[Tensor]:
    """The two shards of a tensor; the tensor twice if it does not have the index."""
    if index not in names:
        return [value, value]
    # Contiguous, as computed shards are: the kernel of layer norm's gradient counts on it.
    return [half.contiguous() for half in value.chunk(2, names.index(index))]


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    assert got.shape == wanted.shape, what
    if wanted.is_floating_point():
        torch.testing.assert_close(
            got, wanted, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}"
        )
    else:
        assert torch.equal(got, wanted), what


def check_shards(node: fx.Node, rule: Notation) -> None:
    """Sharding any index that may be: results joined along it, or added up."""
    tensors = tensor_arguments(node)
    whole = tensors_of(node.meta["val"])
    assert [len(names) for names in rule.inputs] == [len(shape_of(t)) for t in tensors]
    assert [len(names) for names in rule.outputs] == [w.dim() for w in whole]
    for index in {i for names in rule.inputs for i in names} - rule.whole - {"", "1"}:
        summed = [
            k for k, names in enumerate(rule.outputs) if index not in names and k not in rule.kept
        ]
        if summed and not rule.sums:
            continue  # a rule that refuses is a legal one
        sizes = [
            shape_of(t)[n.index(index)]
            for t, n in zip(tensors, rule.inputs, strict=True)
            if index in n
        ]
        sizes += [
            w.shape[n.index(index)] for w, n in zip(whole, rule.outputs, strict=True) if index in n
        ]
        if any(size % 2 for size in sizes):
            continue
        shards = [
            halves(t.meta["val"], n, index) for t, n in zip(tensors, rule.inputs, strict=True)
        ]
        local = {
            tuple(w.shape): tuple(
                s // 2 if i == index else s for s, i in zip(w.shape, n, strict=True)
            )
            for w, n in zip(whole, rule.outputs, strict=True)
        }
        if "input_size" in {a.name for a in node.target._schema.arguments}:
            local = {s: (s[0] // 2, *s[1:]) for s in local}
        parts = [
            tensors_of(computed(node, {i: s[half] for i, s in enumerate(shards)}, local))
            for half in (0, 1)
        ]
        for k, names in enumerate(rule.outputs):
            left, right = parts[0][k], parts[1][k]
            what = f"{node.target}: {index} of output {k}"
            if k in rule.kept:
                same(left, whole[k], what)
                same(right, whole[k], what)
            elif index in names:
                same(torch.cat([left, right], names.index(index)), whole[k], what)
            else:
                same(left + right, whole[k], what)


def check_linear(node: fx.Node, rule: Notation) -> None:
    """Where `linear` says so: results of two terms of the inputs add up to that of their sum."""
    tensors = tensor_arguments(node)
    whole = tensors_of(node.meta["val"])
    for group in rule.linear:
        if not all(tensors[i].meta["val"].is_floating_point() for i in group):
            continue
        first = {i: torch.randn_like(tensors[i].meta["val"]) for i in group}
        second = {i: tensors[i].meta["val"] - first[i] for i in group}
        parts = [tensors_of(computed(node, half)) for half in (first, second)]
        for k, wanted in enumerate(whole):
            same(parts[0][k] + parts[1][k], wanted, f"{node.target}: linear in {sorted(group)}")


def check_unread(node: fx.Node, rule: Notation) -> None:
    tensors = tensor_arguments(node)
    other = {i: torch.randn_like(tensors[i].meta["val"]) for i in rule.unread}
    for got, wanted in zip(
        tensors_of(computed(node, other)), tensors_of(node.meta["val"]), strict=True
    ):
        same(got, wanted, f"{node.target}: reads what its rule says it does not")


def check(node: fx.Node, rule: Notation) -> None:
    check_shards(node, rule)
    check_linear(node, rule)
    check_unread(node, rule)


def test_every_rule_has_a_case() -> None:
    assert set(RULES) - FACTORIES <= set(CASES)


@pytest.mark.parametrize("target", CASES, ids=str)
@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_rule(target: Any, data: st.DataObject) -> None:
    torch.manual_seed(0)
    args, kwargs = CASES[target](Draw(data))
    node = graph_of(target, args, kwargs)
    rule = rule_of(node)
    assert rule is not None
    check(node, rule)


def _softmax_of_shards(node: fx.Node) -> Notation:
    (names,) = rule_of(node).inputs
    return Notation((names,), (names,))


def _mean_as_a_sum(node: fx.Node) -> Notation:
    return replace(rule_of(node), whole=frozenset(), sums=True)


def _exponential_as_linear(node: fx.Node) -> Notation:
    return replace(rule_of(node), linear=(frozenset({0}),))


@pytest.mark.parametrize(
    ("target", "args", "wrong"),
    [
        (aten._softmax.default, (1, False), _softmax_of_shards),
        (aten.mean.dim, ([0],), _mean_as_a_sum),
        (aten.exp.default, (), _exponential_as_linear),
    ],
    ids=["softmax", "mean", "exp"],
)
def test_a_wrong_rule_is_caught(
    target: Any, args: tuple[Any, ...], wrong: Callable[[fx.Node], Notation]
) -> None:
    node = graph_of(target, (torch.randn(4, 4, dtype=torch.float64), *args), {})
    check(node, rule_of(node))
    with pytest.raises(AssertionError):
        check(node, wrong(node))


def test_a_rule_that_shards_nothing_it_could_is_told_apart() -> None:
    """The batch must stay shardable where it matters: rules may not be merely careful."""
    x = torch.randn(4, 2, dtype=torch.float64)
    labels = torch.tensor([1, 0, 1, -100])
    for target, args, index in [
        (aten.mm.default, (x, x.t()), "m"),
        (aten.mm.default, (x.t(), x), "k"),
        (aten.native_layer_norm.default, (x, [2], None, None, 1e-5), ".0"),
        (aten._log_softmax.default, (x, 1, False), ".0"),
        (aten.nll_loss_forward.default, (x, labels, None, 2, -100), "n"),
        (aten.index_select.default, (x, 0, labels.clamp(0)), "j"),
        (aten.mse_loss.default, (x, x, 2), ".0"),
    ]:
        rule = rule_of(graph_of(target, args, {}))
        assert index not in rule.whole
        assert rule.sums or all(index in names for names in rule.outputs)


@pytest.mark.parametrize(
    "name", ["gpt", "gpt2", "bert", "t5", "bart", "vit", "swin", "llama", "resnet", "wav2vec2"]
)
def test_every_op_of_the_zoo_has_a_rule(name: str, captured: Callable[[str], StepGraph]) -> None:
    nodes = [n for n in captured(name).graph.graph.nodes if n.op == "call_function"]
    calls = [n for n in nodes if n.target is not operator.getitem]
    without = {str(n.target) for n in calls if rule_of(n) is None}
    assert without == set()
