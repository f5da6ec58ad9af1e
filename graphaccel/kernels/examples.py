"""Example inputs of a fused op: for tracing its patterns, for registration, for checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.kernels.spec import Fusion, Scalar, T

LEADING = (3, 5)  # the sizes that `...` stands for
_SIZES = (6, 8, 10, 12, 14, 16, 18, 22)


def sizes_of(fusion: Fusion, choice: int = 0) -> dict[str, int]:
    """A size for each index: those the fusion specifies, else small even ones, all different."""
    names = dict.fromkeys(
        i for t in fusion.tensors.values() for i in t.indices if i != "..." and not i.isdigit()
    )
    free = iter(_SIZES)
    return {
        n: fusion.sizes[n][choice % len(fusion.sizes[n])] if n in fusion.sizes else next(free)
        for n in names
    }


def shape(spec: T, sizes: Mapping[str, int], leading: tuple[int, ...] = LEADING) -> tuple[int, ...]:
    """The shape of a tensor at some sizes."""
    results: list[int] = []
    for index in spec.indices:
        if index == "...":
            results += leading
        else:
            results.append(int(index) if index.isdigit() else sizes[index])
    return tuple(results)


def tensor(
    spec: T,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    leading: tuple[int, ...] = LEADING,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Normally distributed values; integers below the size of an index, some of them ignored
    (-100); or booleans."""
    wanted = shape(spec, sizes, leading)
    if spec.broadcast or spec.mask:
        wanted = (1, *wanted[1:])
    if spec.dtype == "bool":
        return truths(wanted, generator)
    if spec.below:
        result = torch.randint(0, sizes[spec.below], wanted, generator=generator)
        if spec.ignored and result.numel() > 2:
            result.view(-1)[1::3] = -100
        return result
    return torch.randn(wanted, generator=generator, dtype=torch.float64).to(dtype)


def truths(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Booleans, three in ten true, and never the first of a row."""
    result = torch.rand(shape, generator=generator) < 0.3
    result[..., 0] = False
    return result


def example(
    fusion: Fusion,
    dtype: torch.dtype,
    sizes: Mapping[str, int] | None = None,
    leading: tuple[int, ...] = LEADING,
    seed: int = 0,
) -> dict[str, Any]:
    """Every input by name, optional ones included."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes_of(fusion) if sizes is None else sizes
    return {
        name: spec.default
        if isinstance(spec, Scalar)
        else tensor(spec, dtype, sizes, leading, generator)
        for name, spec in fusion.inputs.items()
    }


@contextmanager
def fakes(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same values without data, inside their fake tensor mode."""
    mode = FakeTensorMode()
    given = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in values.items()}
    with mode:
        yield given
