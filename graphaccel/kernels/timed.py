"""Inputs for timing a fused op within a budget of bytes, and the bytes that the op has to move.

Bytes are those of distinct operands and results, each once, of the op's own fakes: those of a
kernel that reads and writes nothing twice. Of inputs that are gathered from, only the rows in the
output count; the backward needs only their shape (`planner.profile.cost.node_bytes` counts the
same).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.kernels.examples import shape, sizes_of, tensor
from graphaccel.kernels.register import backward_of, op_of, parameters, tensors
from graphaccel.kernels.spec import Function, Fusion, T

VOCABULARY = 1 << 15
"""The upper bound of integers that index a vocabulary, where the budget allows it."""
_HEAD = 8  # times the largest size that is checked: rotary's 16 becomes a head dim of 128
_FEWEST = 16


@dataclass(frozen=True)
class Shapes:
    """sizes: of each index. leading: the sizes of `...`."""

    sizes: Mapping[str, int]
    leading: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """Bytes that an op reads and writes; backward: 0 where nothing has a gradient."""

    forward: int
    backward: int


def pattern_of(fusion: Fusion) -> Function:
    """The pattern with the most inputs, with which eager is timed."""
    return max(fusion.patterns, key=lambda p: len(parameters(p)))


def shapes_of(fusion: Fusion, dtype: torch.dtype, budget: int, width: int) -> Shapes:
    """Shapes with which neither direction moves more than `budget` bytes; rows are doubled up to
    that limit.

    width: size of all indices except rows, vocabularies, and those whose sizes the fusion specifies
    and that no weight has (a head dim). Weights take at most half of the budget. Where the op
    refuses such shapes, the largest that it is checked with are used.
    """
    heads = _heads(fusion)
    sizes = dict.fromkeys(sizes_of(fusion), width) | _vocabularies(fusion) | heads
    rows = _row_index(fusion)
    fixed = {rows, *heads}
    if not _takes(fusion, dtype, _at(fusion, sizes, rows, 1, width)):
        sizes = sizes_of(fusion) | {n: max(s) for n, s in fusion.sizes.items()}
        fixed = {rows, *fusion.sizes}

    def moved(count: int) -> int:
        result = traffic(fusion, dtype, _at(fusion, sizes, rows, count, width))
        return max(result.forward, result.backward)

    while moved(1) > budget // 2:
        free = {n: s for n, s in sizes.items() if n not in fixed and s > _FEWEST}
        if not free:
            break
        largest = max(free, key=lambda n: free[n])
        sizes[largest] //= 2
    count = 1
    while moved(2 * count) <= budget:
        count *= 2
    return _at(fusion, sizes, rows, count, width)


def values_of(fusion: Fusion, dtype: torch.dtype, shapes: Shapes) -> dict[str, Any]:
    """Every input of the op by name, on the CPU; those that its pattern lacks are None, or the
    default of a number. No label is ignored, and inputs with a gradient are not broadcast."""
    generator = torch.Generator().manual_seed(0)
    return _values(
        fusion, lambda spec: tensor(spec, dtype, shapes.sizes, shapes.leading, generator)
    )


def traffic(fusion: Fusion, dtype: torch.dtype, shapes: Shapes) -> Traffic:
    """Bytes that the forward and the backward op move, computed from fakes."""
    with FakeTensorMode():
        values = _fakes(fusion, dtype, shapes)
        built = tensors(op_of(fusion)(*values.values()))
        gathered = [n for n in fusion.gathered if values[n] is not None]
        read = [v for n, v in values.items() if n not in gathered]
        forward = _bytes([*read, *built]) + len(gathered) * built[0].nbytes
        if not fusion.differentiable:
            return Traffic(forward, 0)
        given = backward_arguments(fusion, values, built)
        results = tensors(backward_call(fusion)(*given.values()))
        read = [v for n, v in given.items() if n not in gathered]
        return Traffic(forward, _bytes([*read, *results]))


def backward_call(fusion: Fusion) -> Callable[..., Any]:
    """The backward as the runtime calls it: the op, or the inlined function."""
    if not fusion.inline:
        return backward_of(fusion)
    assert fusion.backward is not None
    return fusion.backward


def backward_arguments(
    fusion: Fusion, values: Mapping[str, Any], built: Sequence[Tensor]
) -> dict[str, Any]:
    """Its arguments by name. made: results of the forward; all gradients are wanted."""
    known = {**values, **dict(zip(fusion.results, built, strict=True))}
    known |= {f"grad_{n}": torch.ones_like(known[n]) for n in fusion.outputs}
    known["wanted"] = [n in fusion.differentiable and v is not None for n, v in values.items()]
    return {n: known[n] for n in fusion.read_back}


def _vocabularies(fusion: Fusion) -> dict[str, int]:
    return {t.below: VOCABULARY for t in fusion.tensors.values() if t.below}


def _heads(fusion: Fusion) -> dict[str, int]:
    """Sizes of indices that the fusion specifies and that no weight has."""
    weights = {i for t in fusion.tensors.values() if "..." not in t.indices for i in t.indices}
    return {n: _HEAD * max(s) for n, s in fusion.sizes.items() if n not in weights}


def _row_index(fusion: Fusion) -> str:
    """The row index where no tensor has leading dims: the first index of the first tensor."""
    specs = list(fusion.tensors.values())
    if any("..." in t.indices for t in specs):
        return ""
    return next((i for t in specs for i in t.indices if not i.isdigit()), "")


def _at(fusion: Fusion, sizes: Mapping[str, int], rows: str, count: int, width: int) -> Shapes:
    """These sizes with `count` rows: leading dims, which are [rows, width] where a tensor has no
    others."""
    if rows:
        return Shapes({**sizes, rows: count}, ())
    named = any("..." in t.indices and len(t.indices) > 1 for t in fusion.tensors.values())
    return Shapes(sizes, (count,) if named else (count, width))


def _takes(fusion: Fusion, dtype: torch.dtype, shapes: Shapes) -> bool:
    """Whether the op supports these shapes, and its pattern can be called with them."""
    with FakeTensorMode():
        values = _fakes(fusion, dtype, shapes)
        if fusion.legal is not None and fusion.legal(**values) is not None:
            return False
        pattern = pattern_of(fusion)
        try:
            pattern(**{n: values[n] for n in parameters(pattern)})
            op_of(fusion)(*values.values())
        except Exception:  # an author's code, at shapes that it was not checked with
            return False
    return True


def _fakes(fusion: Fusion, dtype: torch.dtype, shapes: Shapes) -> dict[str, Any]:
    """The inputs in a fake tensor mode, in which no number is drawn."""

    def built(spec: T) -> Tensor:
        wanted = shape(spec, shapes.sizes, shapes.leading)
        if wanted and (spec.broadcast or spec.mask):
            wanted = (1, *wanted[1:])
        kind = torch.bool if spec.dtype == "bool" else torch.int64 if spec.below else dtype
        return torch.empty(wanted, dtype=kind)

    return _values(fusion, built)


def _values(fusion: Fusion, built: Callable[[T], Tensor]) -> dict[str, Any]:
    names = parameters(pattern_of(fusion))
    values: dict[str, Any] = {}
    for name, spec in fusion.inputs.items():
        if not isinstance(spec, T):
            values[name] = spec.default
        elif name not in names:
            values[name] = None
        else:
            whole = spec.broadcast and not spec.differentiable
            values[name] = built(replace(spec, broadcast=whole, ignored=False))
    return values


def _bytes(values: Sequence[Any]) -> int:
    return sum(math.prod(v.shape) * v.element_size() for v in values if isinstance(v, Tensor))
