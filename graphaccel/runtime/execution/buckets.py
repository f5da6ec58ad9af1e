"""The flat gradient accumulation buckets, reused from step to step.

Fresh memory costs a page fault for every few KiB, so a bucket is reused once no tensor outside uses
its memory: after `zero_grad()`, with which the script drops the views that are its `.grad`s. A
script that keeps its gradients (accumulation over several calls) gets another bucket meanwhile;
CUDA graphs contain addresses, so for them that one is kept as well.
"""

from __future__ import annotations

import torch

from graphaccel.compat.torch.tensors import storage_uses
from graphaccel.ir.program import StageProgram


class Buckets:
    """One session's buckets: at most `copies` for each stage and position in its list."""

    def __init__(self, copies: int = 1) -> None:
        self._copies = copies
        self._kept: dict[tuple[int, int], list[tuple[torch.Tensor, int]]] = {}

    def of(
        self, stage: StageProgram, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """A stage's accumulators by parameter name, views of its buckets, and the buckets. Their
        contents are uninitialised."""
        graph, values = stage.gradients()
        assert graph is not None
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        likes = {
            v.name: n.meta["val"]
            for n, v in zip(nodes, values, strict=True)
            if v.kind == "accumulator"
        }
        accumulators, buckets = {}, []
        for number, names in enumerate(stage.buckets):
            sizes = [likes[n].numel() for n in names]
            flat = self._flat((stage.stage, number), sum(sizes), likes[names[0]].dtype, device)
            for name, piece in zip(names, flat.split(sizes), strict=True):
                accumulators[name] = piece.view(likes[name].shape)
            buckets.append(flat)
        return accumulators, buckets

    def _flat(
        self, key: tuple[int, int], count: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        kept = self._kept.setdefault(key, [])
        for flat, uses in kept:
            if flat.numel() == count and flat.dtype == dtype and storage_uses(flat) == uses:
                return flat
        flat = torch.empty(count, dtype=dtype, device=device)
        kept.append((flat, storage_uses(flat)))
        del kept[: -self._copies]
        return flat
