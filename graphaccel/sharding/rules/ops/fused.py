"""Sharding rules of fused ops and their backwards, from the index names in the op's own file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphaccel.kernels.register import fusion_of, is_backward
from graphaccel.kernels.spec import Fusion, T
from graphaccel.sharding.rules.notation import Indices, Notation, output_shapes, shape_of


def fused_rule(node: fx.Node) -> Notation | None:
    """The rule of a call of a fused op; None for any other op."""
    fusion = fusion_of(node.target)
    if fusion is None:
        return None
    if not is_backward(node.target):
        given = _given(fusion, tuple(fusion.inputs), node)
        inputs = _spelled(given)
        outputs = _outputs(list(fusion.results.values()), node)
        return Notation(inputs, outputs, frozenset(fusion.whole), sums=fusion.sums)
    given = _given(fusion, fusion.read_back, node)
    inputs = _spelled(given)
    wanted = [fusion.tensors[n] for n in fusion.returned]
    kept = [t for t, v in zip(wanted, _values(node), strict=True) if isinstance(v, torch.Tensor)]
    outputs = _outputs(kept, node)
    gradients = frozenset(range(sum(n.startswith("grad_") for n, _, _ in given)))
    return Notation(inputs, outputs, frozenset(fusion.whole), (gradients,))


def _values(node: fx.Node) -> Sequence[object]:
    value = node.meta["val"]
    return [value] if isinstance(value, torch.Tensor) else value


_Given = list[tuple[str, T, tuple[int, ...]]]


def _given(fusion: Fusion, names: Sequence[str], node: fx.Node) -> _Given:
    """Name, index names and shape of each tensor among a call's arguments."""
    known = {**fusion.results, **fusion.tensors}
    known |= {f"grad_{n}": t for n, t in fusion.outputs.items()}
    return [
        (n, known[n], shape_of(value))
        for n, value in zip(names, node.args, strict=True)
        if isinstance(value, fx.Node)
    ]


def _spelled(given: _Given) -> tuple[Indices, ...]:
    """Indices with `...` expanded, aligned at the right; a dim of size one where another tensor has
    more is broadcast."""
    rows = [(_aligned(t.indices, len(s)), s) for _, t, s in given]
    sizes: dict[str, int] = {}
    for names, shape in rows:
        for index, size in zip(names, shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 1))
    return tuple(
        tuple("1" if n == 1 and sizes[i] > 1 else i for i, n in zip(names, shape, strict=True))
        for names, shape in rows
    )


def _aligned(indices: Indices, rank: int) -> Indices:
    """`... d` of four dims becomes `.3 .2 .1 d`, numbered from the right."""
    if "..." not in indices:
        return tuple("1" if i.isdigit() else i for i in indices)
    at = indices.index("...")
    count = rank - len(indices) + 1
    dots = tuple(f".{count - k}" for k in range(count))
    results = (*indices[:at], *dots, *indices[at + 1 :])
    return tuple("1" if i.isdigit() else i for i in results)


def _outputs(specs: Sequence[T], node: fx.Node) -> tuple[Indices, ...]:
    shapes = output_shapes(node)
    return tuple(_aligned(t.indices, len(s)) for t, s in zip(specs, shapes, strict=True))
