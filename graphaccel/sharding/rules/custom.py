"""Sharding rules that users register for their own ops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.errors import RuleWrong
from graphaccel.sharding.rules.notation import Notation, einsum
from graphaccel.sharding.rules.prove import call_node, faults

_ATTRIBUTE = "graphaccel_rule"  # on the op itself, so that a rule lives as long as its op


def sharding_rule(
    op: Any,
    rule: str,
    *,
    example: Sequence[Any],
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    sums: bool = True,
) -> None:
    """Register the sharding rule of an op of your own, in index notation.

        graphaccel.sharding_rule("mylib::scaled", "... d, d -> ... d", example=(x, scale))

    op: `torch.ops.mylib.scaled.default` or its name (`mylib::scaled.Scalar`, where it has several
    overloads). rule: as in einsum, one name a dim, tensors in the order of the op's arguments;
    `...` stands for leading dims. An index that is missing on the right is summed over, so that
    sharding it makes a partial sum, unless `sums` is False. whole: indices, separated by blanks,
    that cannot be sharded. linear: groups of input positions in which the op is linear. example:
    arguments to prove the rule on, with dims of even sizes, float64 where floating; the op runs on
    the full tensors and by shards.

    Raises RuleWrong (GA302) when the two differ.
    """
    target = _resolved(op)
    groups = tuple(tuple(g) for g in linear)

    def built(node: fx.Node) -> Notation:
        return einsum(rule, node, whole=whole.split(), linear=groups, sums=sums)

    try:
        node = call_node(target, tuple(example), {})
        wrong = next(faults(node, built(node)), None)
    except ValueError as error:
        wrong = str(error)
    if wrong is not None:
        raise RuleWrong(op=str(target), rule=rule, reason=wrong)
    setattr(target, _ATTRIBUTE, built)


def own_rule(node: fx.Node) -> Notation | None:
    """The rule that a user registered for the op of a call, or None."""
    result = getattr(node.target, _ATTRIBUTE, None)
    return None if result is None else result(node)


def _resolved(op: Any) -> Any:
    if not isinstance(op, str):
        return getattr(op, "default", op)
    space, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload or "default")
