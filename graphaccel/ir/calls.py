"""Facts about one call of a graph: its op, its named arguments, whether it is random or causal."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.ops import schema

aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
# Captured on a CPU, attention is this op; torch counts FLOPs of its CUDA variant only.
COUNTED_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


def arguments(node: fx.Node) -> dict[str, Any]:
    """A call's arguments by the names of the op's schema, defaults filled in."""
    known = schema(node)
    given = dict(zip((a.name for a in known), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in known}


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; attention without dropout does not, though tagged so."""
    if _RANDOM not in getattr(node.target, "tags", ()):
        return False
    return arguments(node).get("dropout_p") != 0.0


_DRAWS = frozenset(
    {
        aten.rand.default, aten.randn.default, aten.rand_like.default, aten.randn_like.default,
        aten.randint.default, aten.randint.low, aten.randint_like.default,
        aten.randint_like.low_dtype, aten.randperm.default, aten.bernoulli.p, aten.uniform.default,
        aten.normal_functional.default, aten.exponential.default,
    }
)  # fmt: skip


def draws_by_shape(node: fx.Node) -> bool:
    """Whether a call draws random numbers and reads of its tensors only the shape and the dtype."""
    return node.target in _DRAWS


def is_causal(node: fx.Node) -> bool:
    """Whether a call of attention has a causal mask by its `is_causal` argument."""
    names = [a.name for a in schema(node)]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("is_causal") is True


def op_packet(node: fx.Node) -> Any:
    """The op without its overload: `aten.add` for `aten.add.Tensor`; None if there is none."""
    return getattr(node.target, "overloadpacket", None)


def counted_packet(node: fx.Node) -> Any:
    """The op under which `torch.utils.flop_counter` counts a call."""
    packet = op_packet(node)
    return COUNTED_LIKE.get(packet, packet)
