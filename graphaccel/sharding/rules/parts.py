"""Ops between the values of one part of the batch (microbatch x data rank) and the whole batch.

Both ops only mark a place in the graph of one part: the runtime joins, sums and slices between the
graphs (`passes.microbatch.two_pass_head`), so neither op has a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("graphaccel", "FRAGMENT")
_LIBRARY.define("whole_batch(Tensor x, str how, int dim, int outer, int parts) -> Tensor")
_LIBRARY.define("batch_part(Tensor x, int dim, int outer, int parts) -> Tensor")

JOINED, SUMMED, SAME = "joined", "summed", "same"
"""How a value of the whole batch follows from those of its parts: concatenated along a dim, summed,
or equal to any of them."""


@torch.library.register_fake("graphaccel::whole_batch", lib=_LIBRARY)
def _whole_batch(x: Tensor, how: str, dim: int, outer: int, parts: int) -> Tensor:
    shape = list(x.shape)
    if how == JOINED:
        shape[dim] *= parts
    return x.new_empty(shape)


@torch.library.register_fake("graphaccel::batch_part", lib=_LIBRARY)
def _batch_part(x: Tensor, dim: int, outer: int, parts: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= parts
    return x.new_empty(shape)


WHOLE = torch.ops.graphaccel.whole_batch.default
PART = torch.ops.graphaccel.batch_part.default
