"""Replace causal attention masks with the `is_causal` flag of attention.

  before                                           after
    %m: b8[2,1,8,8] = aten.le(%keys, %queries)       %y = scaled_dot_product_attention(%q, %k, %v,
    %y = scaled_dot_product_attention(%q, %k, %v,                                      is_causal)
                                      %m)

Hugging Face's models pass no mask in eager mode and build one where they are exported. With a mask
attention does twice the work, and GPU kernels that never store the scores do not accept one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from graphaccel.compat.torch.fakes import without_fakes
from graphaccel.compat.torch.ops import schema
from graphaccel.ir.calls import is_random
from graphaccel.ir.values import op_of, operands

aten = torch.ops.aten
_WHOLE = 1 << 22  # largest number of elements computed at once
_FEW = 3
_CHUNK, _ALL = 256, 512  # rows at a time; for longer sequences, rows in all, evenly spaced


def causal_attention(node: fx.Node) -> None:
    """Rewrite a call to `scaled_dot_product_attention`, in place, if its mask is causal.

    The mask must depend on sizes alone and is computed for three examples: equal to the lower
    triangle in every row (for sequences over 512 positions, in that many rows; numbers in it are 0
    or 1, so that the rows in between follow the same pattern). An additive mask is 0 where such a
    mask is true, and elsewhere large enough to remove the score.
    """
    names = [a.name for a in schema(node)]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    mask = given.get("attn_mask")
    if not isinstance(mask, fx.Node) or given.get("is_causal"):
        return
    queries, keys = (given[k].meta["val"].shape[-2] for k in ("query", "key"))
    mask = _choice(mask)
    value = mask.meta["val"]
    if queries != keys or value.dtype != torch.bool or value.shape[-2:] != (queries, keys):
        return
    if queries > 1 and _depends_on_sizes_alone(mask) and _is_causal(mask, queries):
        query, key, values = node.args[:3]
        node.args = (query, key, values, None, given.get("dropout_p", 0.0), True)
        kept = ("scale", "enable_gqa")
        node.kwargs = {k: v for k, v in node.kwargs.items() if k in kept}


def _choice(mask: fx.Node) -> fx.Node:
    """The boolean mask from which an additive mask is computed, or the mask itself."""
    node = mask
    while _keeps_lows(node):
        node = operands(node)[0]
    if node.target is not aten.where.ScalarOther or not node.meta["val"].is_floating_point():
        return mask
    condition, zero, low = operands(node)
    none = zero.target in (aten.zeros.default, aten.zeros_like.default) or (
        zero.target in (aten.full.default, aten.scalar_tensor.default) and zero.args[-1] == 0
    )
    return condition if none and _hides(low, node) else mask


def _keeps_lows(node: fx.Node) -> bool:
    """Whether a call preserves 0 and the lowest numbers as far as a softmax can tell."""
    if not node.meta["val"].is_floating_point():
        return False
    if node.target is aten.clamp.default and len(node.args) == 2 and not node.kwargs:
        return _hides(node.args[1], node)
    return node.target is aten._to_copy.default


def _hides(low: Any, node: fx.Node) -> bool:
    return low <= torch.finfo(node.meta["val"].dtype).min / 2


def _depends_on_sizes_alone(mask: fx.Node) -> bool:
    seen, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        if (
            node.op != "call_function"
            or is_random(node)
            or not isinstance(node.meta.get("val"), Tensor)
        ):
            return False
        numbers = [
            a
            for a in (*operands(node), *node.kwargs.values())
            if isinstance(a, (int, float, complex))
        ]
        if _is_pointwise(node) and any(abs(n) > 1 for n in numbers):  # for example a window
            return False
        new = [n for n in node.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return True


def _is_causal(mask: fx.Node, size: int) -> bool:
    with without_fakes(), torch.no_grad():
        values = _Values(mask.meta["val"].shape[0], size)
        column = torch.arange(size)
        for rows in _chunks(size):
            try:
                result = values.rows(mask, rows)
            except (RuntimeError, IndexError):  # shapes do not match for few examples
                return False
            wanted = column <= rows[:, None]
            if result is None or not torch.equal(result, wanted.expand(result.shape)):
                return False
    return True


def _chunks(size: int) -> Iterator[Tensor]:
    count = min(size, _ALL)
    rows = torch.div(torch.arange(count) * (size - 1), max(1, count - 1), rounding_mode="floor")
    yield from rows.split(_CHUNK)


def _is_pointwise(node: fx.Node) -> bool:
    logical = (aten.__and__.Tensor, aten.__or__.Tensor)
    return node.target in logical or torch.Tag.pointwise in getattr(node.target, "tags", ())


class _Values:
    """Values of calls that depend on sizes alone: small tensors in full, of others some rows. A
    large number of examples, unless equal to the number of positions, is replaced by a small
    one."""

    def __init__(self, examples: int, size: int) -> None:
        self._size = size
        self._examples = examples if _FEW < examples != size else None
        self._known: dict[fx.Node, Tensor] = {}

    def rows(self, node: fx.Node, rows: Tensor) -> Tensor | None:
        """Rows along the second-last dim, or all if its size is 1; None if they depend on other
        rows."""
        value = node.meta["val"]
        long = value.dim() > 1 and value.shape[-2] == self._size
        if prod(map(self._few, value.shape)) <= _WHOLE:
            whole = self._whole(node)
            return whole[..., rows, :] if long else whole
        if not _is_pointwise(node) and node.target is not aten.expand.default:
            return None
        parts: dict[fx.Node, Any] = {n: self.rows(n, rows) for n in node.all_input_nodes}
        if any(part is None for part in parts.values()):
            return None
        if node.target is aten.expand.default:
            sizes = [self._few(n) for n in operands(node)[1]]
            sizes[-2] = len(rows) if long else sizes[-2]
            return parts[operands(node)[0]].expand(sizes)
        return self._call(node, parts)

    def _whole(self, node: fx.Node) -> Tensor:
        order, stack = [], [node]
        while stack:
            last = stack.pop()
            if last not in self._known:
                order.append(last)
                stack += last.all_input_nodes
        for each in reversed(order):
            if each not in self._known:
                self._known[each] = self._call(each, self._known)
        return self._known[node]

    def _few(self, size: int) -> int:
        return _FEW if size == self._examples else size

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        sized = not _is_pointwise(node)

        def real(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return values[argument]
            if isinstance(argument, torch.device):
                return torch.device("cpu")
            return self._few(argument) if sized and type(argument) is int else argument

        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), real)
        return op_of(node)(*args, **kwargs)
