"""Determine the batch dim of each input: as the user gave it, or the assignments worth trying.

The leading dims are tried first. Where the placement rules refuse to split the batch there, or a
capture at another size has another structure, the next assignment is captured: recurrent layers get
states whose batch is dim 1, and many models take (time, batch) tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, product
from typing import Any, TypeAlias

from graphaccel.capture.batch import Batch, batch_leaves
from graphaccel.errors import GraphMisuse

BatchDims: TypeAlias = int | Mapping[Any, int | None] | None
"""One dim for all inputs, or a dim for each by its name or position (None: it has no batch)."""

MOST = 4
"""Assignments that are tried besides the leading dims."""
_COMBINATIONS = 16


def assignments(batch: Batch) -> list[dict[int, int]]:
    """Possible assignments of batch dims, leaf → dim; the likeliest first.

    Each has one size on all of its dims, and covers at least as many inputs as the leading dims do.
    """
    size, leading = batch_leaves(batch)
    shapes = {i: tuple(t.shape) for i, t in batch.tensors.items() if t.dim() > 0}
    results = [leading]
    if len(leading) < len(shapes):  # a state of (layers, batch, features)
        states = {i: s.index(size) for i, s in shapes.items() if i not in leading and size in s}
        if states:
            results.insert(0, dict(sorted((leading | states).items())))
    others: dict[tuple[Any, ...], dict[int, int]] = {}
    for n in dict.fromkeys(n for s in shapes.values() for n in s):
        places = {i: [d for d, m in enumerate(s) if m == n] for i, s in shapes.items() if n in s}
        if len(places) < len(leading):
            continue
        for dims in islice(product(*places.values()), _COMBINATIONS):
            rank = (-len(places), len(set(dims)), sum(dims), n != size, len(others))
            others[rank] = dict(zip(places, dims, strict=True))
    ordered = [others[rank] for rank in sorted(others)]
    return [*results, *[dims for dims in ordered if dims not in results][:MOST]]


def given_dims(
    batch: Batch, said: int | Mapping[Any, int | None], forward: Callable[..., Any]
) -> dict[int, int]:
    """The batch dims that the user gave, leaf → dim. Inputs that are not mentioned have the batch
    on their leading dim if it has the batch's size.

    forward: the model's, for the names of positional inputs. Raises GraphMisuse (GA407).
    """
    tensors = {i: t for i, t in batch.tensors.items() if t.dim() > 0}
    if isinstance(said, int):
        dims = {i: said for i, t in tensors.items() if -t.dim() <= said < t.dim()}
        silent: set[int] = set()
    else:
        dims, silent = {}, set(tensors)
        for name, dim in said.items():
            leaves = [i for i in tensors if _is_called(batch.names[i], name, forward)]
            if not leaves:
                known = ", ".join(batch.names[i] for i in tensors)
                raise _misread(f"there is no input {name!r}; there are: {known}")
            silent -= {*leaves}
            dims |= {} if dim is None else dict.fromkeys(leaves, dim)
    for i, dim in dims.items():
        if not -tensors[i].dim() <= dim < tensors[i].dim():
            shape = list(tensors[i].shape)
            raise _misread(f"`{batch.names[i]}` has the shape {shape} and no dim {dim}")
    dims = {i: dim % tensors[i].dim() for i, dim in dims.items()}
    sizes = {batch.names[i]: tensors[i].shape[dim] for i, dim in dims.items()}
    if len(set(sizes.values())) > 1:
        raise _misread(f"the dims given have several sizes: {sizes}")
    for size in set(sizes.values()):
        dims |= {i: 0 for i in silent if tensors[i].shape[0] == size}
    return dict(sorted(dims.items()))


def check_batch_dims(said: Any) -> None:
    """Raises GraphMisuse (GA407) for a value that does not specify dims."""
    values: Sequence[Any] = [said]
    if isinstance(said, Mapping):
        values = list(said.values())
    if not all(v is None or (isinstance(v, int) and not isinstance(v, bool)) for v in values):
        raise _misread(f"{said!r} is neither a dim nor a dim for each input")


def _is_called(leaf: str, name: Any, forward: Callable[..., Any]) -> bool:
    """Whether a leaf is, or is inside of, the input with this name or position."""
    heads = [f"args[{name}]" if isinstance(name, int) else str(name)]
    places = [n for n, p in inspect.signature(forward).parameters.items() if n != "self"]
    if name in places:
        heads.append(f"args[{places.index(name)}]")
    return any(leaf == head or leaf.startswith((f"{head}[", f"{head}.")) for head in heads)


def _misread(what: str) -> GraphMisuse:
    return GraphMisuse(
        what=f"batch_dims: {what}",
        help_line="graphaccel.optimize(model, optimizer, batch_dims={'tokens': 1, 0: 1})  # the "
        "dim of the examples, by the name or position of an input",
    )
