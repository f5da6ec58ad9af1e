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
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.sharding.rules.notation import Notation
from graphaccel.sharding.rules.ops import collectives, factories
from graphaccel.sharding.rules.prove import call_node, faults
from graphaccel.sharding.rules.table import RULES, rule_of
from tests.support.ops.calls import Draw
from tests.support.ops.cases import CASES

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
FACTORIES = factories.UNIFORM | factories.COUNTS | factories.ORDERED


def check(node: fx.Node, rule: Notation) -> None:
    assert list(faults(node, rule)) == [], node.target


def test_every_rule_has_a_case() -> None:
    # Collectives need other ranks: tests/sharding/test_shard_axis.py runs them.
    assert set(RULES) - FACTORIES - set(collectives.RULES) <= set(CASES)


@pytest.mark.parametrize("target", CASES, ids=str)
@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_rule(target: Any, data: st.DataObject) -> None:
    torch.manual_seed(0)
    args, kwargs = CASES[target](Draw(data))
    node = call_node(target, args, kwargs)
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
    node = call_node(target, (torch.randn(4, 4, dtype=torch.float64), *args), {})
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
        rule = rule_of(call_node(target, args, {}))
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
