"""Sharding rules of users' own ops: proved when they are given, and used from then on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import graphaccel
from graphaccel.errors import RuleWrong
from graphaccel.sharding.rules.notation import Notation
from graphaccel.sharding.rules.prove import call_node
from graphaccel.sharding.rules.table import rule_of


@pytest.fixture(scope="module")
def library_op() -> Iterator[Any]:
    """x / (the sum of its rows) * scale: an op that no table knows."""
    library = torch.library.Library("mylib", "FRAGMENT")
    library.define("evened(Tensor x, Tensor scale) -> Tensor")

    def evened(x: Tensor, scale: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True) * scale

    library.impl("evened", evened, "CompositeExplicitAutograd")
    found = torch.ops.mylib.evened.default
    yield found
    del library  # the op is gone with it


@pytest.fixture
def op(library_op: Any) -> Iterator[Any]:
    """The op, without a rule at the start."""
    yield library_op
    vars(library_op).pop("graphaccel_rule", None)


EXAMPLE = (torch.rand(4, 6, dtype=torch.float64), torch.rand(6, dtype=torch.float64))


def test_a_rule_is_used_once_it_is_given(op: Any) -> None:
    node = call_node(op, EXAMPLE, {})
    assert rule_of(node) is None
    graphaccel.sharding_rule(
        "mylib::evened", "... d, d -> ... d", whole="d", linear=[(1,)], example=EXAMPLE
    )
    assert rule_of(node) == Notation(
        ((".0", "d"), ("d",)), ((".0", "d"),), frozenset({"d"}), (frozenset({1}),)
    )


@pytest.mark.parametrize(
    ("rule", "whole", "linear", "reason"),
    [
        ("n d, d -> n d", "", (), "sharding `d` changes result 0"),
        ("n d, d -> n d", "d", ((0,),), "result 0 is not linear in inputs [0]"),
        ("n d, d -> d", "d", (), "it names other dims than its results have"),
        ("n d -> n d", "d", (), "rule 'n d -> n d' names 1 tensors, the call has 2"),
    ],
)
def test_a_wrong_rule_is_refused(
    op: Any, rule: str, whole: str, linear: tuple, reason: str
) -> None:
    with pytest.raises(RuleWrong) as caught:
        graphaccel.sharding_rule(op, rule, whole=whole, linear=linear, example=EXAMPLE)
    assert str(caught.value) == (
        f"error[GA302]: the sharding rule of mylib.evened.default does not hold: {rule!r}\n"
        f"  why:  run whole and by shards on the example, {reason}\n"
        "  help: name dims that can not be split:  whole='d'\n"
        "  explain: graphaccel explain GA302"
    )
    assert rule_of(call_node(op, EXAMPLE, {})) is None
