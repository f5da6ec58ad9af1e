"""Samples with a batch: those that are split need examples along dim 0, which many samples lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.coverage.entry import SEED, trained

CLOSE = 1e-9


@dataclass(frozen=True)
class Sample:
    """Arguments of a call of a function or module.

    held: flat positions of tensors that belong to the model, not to the batch.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    held: tuple[int, ...] = ()


def with_batch(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Those samples that have examples along dim 0, with twice as many.

    A sample has examples along dim 0 if a call with twice as many gives, of each half, what a call
    with that half gives: the same rows, or scalars whose mean or sum it is. Behind these come those
    where the halves, exchanged, give the result exchanged: batch statistics, but not steps of time.
    """
    likely = []
    for sample in samples:
        for leaves in _candidates(sample):
            doubled, halves, exchanged, held = leaves
            judged = _independent(sample, doubled, halves, exchanged)
            if judged is None:
                continue
            args, kwargs = doubled
            found = Sample(sample.call, args, kwargs, held)
            if judged:
                yield found
                break
            likely.append(found)
    yield from likely


def _candidates(sample: Sample) -> Iterable[tuple[Any, tuple[Any, Any], Any, tuple[int, ...]]]:
    """The call with twice the batch, in every tensor as long as the first one or in that alone; its
    halves; the halves exchanged; and what is not of the batch."""
    if "offsets" in sample.kwargs:  # places in the batch, not part of an example; torch reads them
        return  # without a check, past the end of a half
    leaves, spec = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    long = [i for i in tensors if leaves[i].dim() > 0 and leaves[i].shape[0] > 0]
    if not long or long[0] != tensors[0]:
        return
    first = leaves[long[0]]
    alike = [i for i in long if leaves[i].shape[0] == first.shape[0]]
    for chosen in dict.fromkeys((tuple(alike), (long[0],))):
        other, both, exchanged = list(leaves), list(leaves), list(leaves)
        for i in chosen:
            value = leaves[i].detach()
            other[i] = value.roll(1, -1) if value.dim() > 1 else value.roll(1, 0)
            other[i].requires_grad_(trained(leaves[i]))
            both[i] = torch.cat([value, other[i].detach()]).requires_grad_(trained(leaves[i]))
            exchanged[i] = torch.cat([other[i].detach(), value])
        unflatten = pytree.tree_unflatten
        held = tuple(i for i in tensors if i not in chosen)
        halves = unflatten(leaves, spec), unflatten(other, spec)
        yield unflatten(both, spec), halves, unflatten(exchanged, spec), held


def _independent(
    sample: Sample, doubled: Any, halves: Sequence[Any], exchanged: Any
) -> bool | None:
    """Whether examples do not depend on each other; None if the doubled call has no batch."""
    try:
        whole, *parts, turned = (_outputs(sample, call) for call in (doubled, *halves, exchanged))
    except Exception:
        return None
    if not whole or any(len(part) != len(whole) for part in parts):
        return None
    size = 2 * next(x for x in pytree.tree_leaves(halves[0]) if isinstance(x, Tensor)).shape[0]
    if not all(x.dim() == 0 or x.shape[0] == size for x in whole):
        return None
    if all(map(_joined, whole, *parts)):
        return True
    same = all(
        _close(y, x if x.dim() == 0 else x.roll(size // 2, 0))
        for x, y in zip(whole, turned, strict=True)
    )
    return False if same else None


def _outputs(sample: Sample, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    torch.manual_seed(SEED)
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), call)
    with torch.no_grad():
        found = pytree.tree_leaves(sample.call(*args, **kwargs))
    return [x for x in found if isinstance(x, Tensor)]


def _joined(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the whole is made of the halves, row by row or as a mean or sum."""
    if whole.dim() == 0:
        total = first + second
        return _close(whole, total) or (total.is_floating_point() and _close(whole, total / 2))
    if first.dim() == 0 or second.dim() == 0:
        return False
    both = torch.cat([first, second])
    return both.shape == whole.shape and _close(whole, both)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, CLOSE, CLOSE, equal_nan=True)
