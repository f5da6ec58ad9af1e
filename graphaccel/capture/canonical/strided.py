"""Writes through strided views, whose derivative in torch is not that of the op.

before                                               after
  %w = aten.as_strided(%c, [4], [5], 0)                %w = aten.diagonal(%c)
  %z = aten.as_strided_scatter(%c, %v, [4], [5], 0)    %z = aten.diagonal_scatter(%c, %v)
  %z = aten.as_strided_scatter(%c, %v, [2], [3], 4)    %z = aten.where(%written, %spread, %c)

torch gives what is overwritten a gradient where it is, and none elsewhere (2.11 to 2.13), as if the
numbers that stay were those that go. `fill_diagonal_` is such a write.
"""

from __future__ import annotations

import torch
from torch import fx

from graphaccel.capture.canonical.calls import arguments_of, emit, replace_call

aten = torch.ops.aten


def strided_read(node: fx.Node) -> None:
    """A view of the main diagonal becomes `diagonal`."""
    passed = arguments_of(node)
    if _is_diagonal(passed):
        replace_call(node, emit(node, aten.diagonal.default, passed["self"]))


def strided_write(node: fx.Node) -> None:
    """A write to the main diagonal becomes `diagonal_scatter`; another one chooses between the old
    and the new numbers."""
    passed = arguments_of(node)
    base, source = passed["self"], passed["src"]
    if _is_diagonal(passed):
        replace_call(node, emit(node, aten.diagonal_scatter.default, base, source))
        return
    place = (passed["size"], passed["stride"], passed["storage_offset"])
    scatter = aten.as_strided_scatter.default
    nothing = emit(node, aten.zeros_like.default, base, dtype=torch.bool)
    everything = emit(node, aten.ones_like.default, source, dtype=torch.bool)
    written = emit(node, scatter, nothing, everything, *place)
    zeros = emit(node, aten.zeros_like.default, base)
    spread = emit(node, scatter, zeros, source, *place)
    replace_call(node, emit(node, aten.where.self, written, spread, base))


def _is_diagonal(passed: dict) -> bool:
    """Whether a strided view of a contiguous matrix is its main diagonal."""
    base = passed["self"].meta["val"]
    if base.dim() != 2 or not base.is_contiguous():
        return False
    rows, columns = base.shape
    place = (list(passed["size"]), list(passed["stride"]), passed["storage_offset"] or 0)
    return place == ([min(rows, columns)], [columns + 1], 0)
