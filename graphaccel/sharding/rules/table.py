"""Table of the sharding rules of every ATen op that occurs in captured training steps.

`rule_of(node)` returns the node's `Notation`, or None where no rule is known: callers then refuse a
sharded operand and name the op. Elementwise ops need no entry (`sharding.rules.ops.pointwise`).
"""

from __future__ import annotations

from types import MappingProxyType

from torch import fx

from graphaccel.sharding.rules.custom import own_rule
from graphaccel.sharding.rules.notation import Notation, Rules, kept_whole
from graphaccel.sharding.rules.ops import (
    attention,
    collectives,
    factories,
    fourier,
    images,
    indexing,
    linalg,
    losses,
    matmuls,
    normalise,
    pointwise,
    reductions,
    shapes,
)
from graphaccel.sharding.rules.ops import batch_dims as leading
from graphaccel.sharding.rules.ops.fused import fused_rule

RULES: Rules = MappingProxyType(
    {
        **pointwise.RULES,
        **matmuls.RULES,
        **shapes.RULES,
        **reductions.RULES,
        **indexing.RULES,
        **normalise.RULES,
        **attention.RULES,
        **losses.RULES,
        **images.RULES,
        **leading.RULES,
        **linalg.RULES,
        **factories.RULES,
        **fourier.RULES,
        **collectives.RULES,
    }
)


def rule_of(node: fx.Node) -> Notation | None:
    """The rule of a call, or None."""
    result = RULES.get(node.target)
    if result is not None:
        try:
            return result(node)
        except ZeroDivisionError:  # a dim of a 0-d tensor, which torch allows
            return kept_whole(node)
        except NotImplementedError:  # a form of the call that its rule does not cover
            return None
    if (own := own_rule(node)) is not None:
        return own
    if (fused := fused_rule(node)) is not None:
        return fused
    return pointwise.pointwise_rule(node)
