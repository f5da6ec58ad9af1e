"""Flatten the example batch, and find which of its tensor dims carry the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch

from graphaccel.capture.objects import opened
from graphaccel.compat.torch import pytree
from graphaccel.errors import Unsupported

LONG = 64
"""Positions from which a mask may be too large to be computed in full."""


ARGUMENTS = "arguments"
"""The name of a call's numbers among the Python values that a step depends on."""


@dataclass(frozen=True)
class CallNumber:
    """A number among the leaves of a call, which may be another one in the next call: it is one of
    the Python values that a step depends on, like those that a model holds.

    values: where it is, by name.
    """

    name: str
    values: dict[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Batch:
    """A call `model(*args, **kwargs)`, flattened.

    leaves: every leaf in pytree order, tensors and plain values.
    names: one readable name a leaf (`input_ids`, `args[0]`, `pixels['left']`).
    spec: the pytree structure, to put the leaves together.
    numbers: sets the leaves after those of the call, numbers of the model, while it is traced.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: Any = field(repr=False)
    numbers: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The leaves that are numbers of the model."""
        return self.leaves[self.spec.num_leaves :]

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        """Position among the leaves → tensor."""
        return {i: leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The (args, kwargs) of the call with `leaves`, in the order of `self.leaves`; with the
        current values of its numbers."""
        pairs = zip(self.leaves[: self.spec.num_leaves], leaves, strict=False)
        given = [o.values[o.name] if isinstance(o, CallNumber) else leaf for o, leaf in pairs]
        return pytree.tree_unflatten(given, self.spec)

    @property
    def has_objects(self) -> bool:
        """Whether leaves are attributes of objects that pytree does not know."""
        leaves = self.leaves[: self.spec.num_leaves]
        known = pytree.tree_leaves(self.rebuild(leaves))
        return len(known) != len(leaves) or not all(map(is_, known, leaves))

    def signature(self) -> tuple[Any, ...]:
        """What a captured graph depends on: structure, dtypes, shapes and plain values of the
        batch."""
        described = tuple(
            (str(leaf.dtype), tuple(leaf.shape), str(leaf.device.type), leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else repr(leaf)
            for leaf in self.leaves
        )
        return (str(self.spec), described)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
    """Flatten one call of the model; objects that hold tensors become their attributes.

    Raises Unsupported (GA208) for a tensor that is not dense.
    """
    paths, spec = pytree.tree_flatten_with_path(opened((tuple(args), dict(kwargs))))
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            raise _not_dense(leaf_name(path), leaf)
    return Batch(
        leaves=tuple(leaf for _, leaf in paths),
        names=tuple(leaf_name(path) for path, _ in paths),
        spec=spec,
    )


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example batch as (args, kwargs): a mapping is keywords, a sequence positions, else one
    arg."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def batch_leaves(batch: Batch) -> tuple[int, dict[int, int]]:
    """The batch size, and the batch dim of every leaf that has one.

    The batch size is the most common leading size among the tensors (ties: the first tensor's).
    Scalars and tensors with another leading size have no batch dim. Whether the guess is right is
    proved later: the placement rules refuse a graph that mixes examples (`capture.batch_dims` has
    others).
    """
    leading = [t.shape[0] for t in batch.tensors.values() if t.dim() > 0]
    if not leading:
        return 1, {}
    counts = Counter(leading)
    size = max(leading, key=lambda n: (counts[n], -leading.index(n)))
    dims = {i: 0 for i, t in batch.tensors.items() if t.dim() > 0 and t.shape[0] == size}
    return size, dims


def batch_size(batch: Batch, dims: Mapping[int, int]) -> int:
    """The batch size, given the batch dims of the leaves; 1 where there are none."""
    return next((batch.leaves[i].shape[dim] for i, dim in dims.items()), 1)


def has_dims(batch: Batch, dims: Mapping[int, int]) -> bool:
    """Whether the leaves of a batch have these batch dims."""
    tensors = batch.tensors
    return all(leaf in tensors and tensors[leaf].dim() > dim for leaf, dim in dims.items())


def size_of(batch: Batch, leaf: int, dim: int) -> int:
    """The size of a leaf's dim; 0 where it has no such dim."""
    tensor = batch.tensors.get(leaf)
    return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else 0


def sequence_leaves(batch: Batch, batch_dims: Mapping[int, int]) -> tuple[int, dict[int, int]]:
    """The sequence length and the sequence dims: the other dim of the integer matrices, when all of
    them agree on it."""
    lengths = sequence_lengths(batch, batch_dims)
    return next(iter(lengths.items())) if len(lengths) == 1 else (0, {})


def sequence_lengths(batch: Batch, batch_dims: Mapping[int, int]) -> dict[int, dict[int, int]]:
    """Length → sequence dims of the integer matrices that have it, in the order of the leaves."""
    lengths: dict[int, dict[int, int]] = {}
    for i, dim in batch_dims.items():
        leaf = batch.leaves[i]
        if leaf.dim() == 2 and not leaf.is_floating_point():
            lengths.setdefault(leaf.shape[1 - dim], {})[i] = 1 - dim
    return lengths


def sequence_matrices(
    batch: Batch, batch_dims: Mapping[int, int], length: int, integers: Mapping[int, int]
) -> dict[int, int]:
    """Sequence dims of `integers`, and of other matrices of the same size, such as a mask of
    floats."""
    results = dict(integers)
    for leaf, dim in batch_dims.items():
        tensor = batch.leaves[leaf]
        if tensor.dim() == 2 and tensor.shape[1 - dim] == length:
            results[leaf] = 1 - dim
    return results


def resized(batch: Batch, dims: Mapping[int, int], size: int) -> Batch:
    """The same call with `size` along each of `dims` (values repeated or cut: only shapes
    matter)."""
    leaves = list(batch.leaves)
    for i, dim in dims.items():
        index = torch.arange(size, device=leaves[i].device) % leaves[i].shape[dim]
        chosen = leaves[i].detach().index_select(dim, index)
        leaves[i] = chosen.requires_grad_(leaves[i].requires_grad)
    return replace(batch, leaves=tuple(leaves))


def without_aliases(batch: Batch) -> Batch:
    """The same call with a separate tensor for each leaf: export merges inputs that are one tensor
    (`labels=input_ids`), and the graph would then always read one in place of the other."""
    seen: set[int] = set()
    leaves = []
    for leaf in batch.leaves:
        repeated = isinstance(leaf, torch.Tensor) and id(leaf) in seen
        leaves.append(_copy(leaf) if repeated else leaf)
        seen.add(id(leaf))
    return replace(batch, leaves=tuple(leaves))


def _not_dense(name: str, tensor: torch.Tensor) -> Unsupported:
    dense = "torch.nested.to_padded_tensor(x, 0.0)" if tensor.is_nested else "x.to_dense()"
    kind = "nested" if tensor.is_nested else f"sparse ({tensor.layout})"
    return Unsupported(
        what=f"the input `{name}`, a {kind} tensor,",
        reason="the parts of a plan are cut along the dims of dense tensors",
        help_line=f"pass it dense, from outside of the model:  {dense}",
    )


def _copy(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf, by its path in (args, kwargs): `[0][1]` reads `args[1]`,
    `[1]['labels'][0]` reads `labels[0]`."""
    outer, inner, *rest = path
    head = f"args[{inner.idx}]" if outer.idx == 0 else str(inner.key)
    return head + "".join(str(key) for key in rest)
