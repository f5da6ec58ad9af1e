"""The cases that a fused op is checked on: dtypes, strides, sizes and values of its inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.examples import shape, sizes_of, truths
from graphaccel.kernels.fusion import Fusion, Scalar, T
from graphaccel.kernels.register import parameters, wide_form

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "padded")
GRADIENTS = ("contiguous", "transposed", "expanded")
LEADING = ((3, 5), (2, 17), (7,), (2, 3, 4))


@dataclass(frozen=True)
class Case:
    """One call: its inputs, in words. layout, gradients: strides of the inputs, and of the incoming
    gradients. values: "normal", "large" or "masked". wide: by the form that computes in float32,
    against eager on inputs that are cast to it. one_by_one: also each gradient by itself."""

    dtype: torch.dtype
    layout: str
    gradients: str
    leading: tuple[int, ...]
    choice: int
    values: str
    pattern: int
    scalar: int = 0
    wide: bool = False
    one_by_one: bool = False

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") + (" in float32" if self.wide else "")
        strides = f"{self.layout}, gradients {self.gradients}"
        return f"{kind}, {strides}, {self.values} values, leading {self.leading}"


def cases(fusion: Fusion) -> list[Case]:
    """The grid of a fusion; where it has a form that computes in float32, also on that."""
    grid = [*_grid(fusion)]
    if wide_form(fusion) is not None:
        grid += [replace(c, wide=True) for c in grid if c.dtype != torch.float32]
    return grid


def _grid(fusion: Fusion) -> Iterator[Case]:
    kinds: dict[tuple[str, ...], int] = {}
    for i, pattern in enumerate(fusion.patterns):
        kinds.setdefault(tuple(sorted(parameters(pattern))), i)
    masked = any(t.mask for t in fusion.tensors.values())
    choices = max((len(v) for v in fusion.sizes.values()), default=2)
    free = any("..." in t.indices for t in fusion.tensors.values())
    for dtype, (n, layout), pattern in itertools.product(
        DTYPES, enumerate(LAYOUTS), kinds.values()
    ):
        for i, leading in enumerate(LEADING if free else LEADING[:2]):
            gradients = GRADIENTS[(n + i) % 3]
            yield Case(
                dtype, layout, gradients, leading, i % choices, "normal", pattern, i,
                one_by_one=n == i == 0,
            )  # fmt: skip
        yield Case(dtype, layout, GRADIENTS[n], LEADING[0], 1 % choices, "large", pattern)
        if masked and fusion.masked_rows and "mask" in parameters(fusion.patterns[pattern]):
            yield Case(dtype, layout, GRADIENTS[n], LEADING[1], 1 % choices, "masked", pattern)


def inputs_of(fusion: Fusion, case: Case, device: str) -> dict[str, Any]:
    """Every input of a fusion in a case, by name; the same numbers in every call."""
    sizes = sizes_of(fusion, case.choice)
    free = [n for n in sizes if n not in fusion.sizes]
    if case.choice and free:  # an odd size, not a power of two
        sizes |= {n: s for n, s in zip(free, itertools.cycle((17, 33)), strict=False)}
    generator = torch.Generator().manual_seed(len(str(case)))
    values: dict[str, Any] = {}
    for name, spec in fusion.inputs.items():
        if isinstance(spec, Scalar):
            options = (spec.default, *spec.examples)
            values[name] = options[case.scalar % len(options)]
        else:
            values[name] = _tensor(fusion, case, spec, sizes, generator).to(device)
    return values


def _tensor(
    fusion: Fusion, case: Case, spec: T, sizes: Mapping[str, int], generator: torch.Generator
) -> Tensor:
    wanted = shape(spec, sizes, case.leading)
    if spec.below:
        tensor = torch.randint(0, sizes[spec.below], wanted, generator=generator)
        if spec.ignored and tensor.numel() > 2:
            tensor.view(-1)[1::3] = -100
        return tensor
    if spec.mask or (spec.broadcast and case.choice == 0):
        wanted = (1, *wanted[1:])
    if spec.dtype == "bool":
        return truths(wanted, generator)
    tensor = torch.randn(wanted, generator=generator, dtype=torch.float64)
    if case.values == "large":
        tensor = tensor * min(fusion.large, 100.0 if case.dtype == torch.float16 else 1e30)
    if spec.mask and case.values == "masked" and tensor.dim() >= 2:
        hidden = torch.rand(wanted, generator=generator) < 0.3
        hidden[..., 0] = False
        hidden[..., -1, :] = True  # a row that attends to nothing
        tensor = tensor.masked_fill(hidden, -math.inf)
    return with_layout(tensor.to(case.dtype), case.layout)


def with_layout(value: Tensor, layout: str) -> Tensor:
    """The same values with other strides; for "expanded", those of the first row in every row."""
    if layout == "expanded" and value.dim() >= 1:
        return value[:1].expand(value.shape)
    if layout == "transposed" and value.dim() >= 2:
        return value.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "padded" and value.dim() >= 1:
        room = value.new_zeros((*value.shape[:-1], value.shape[-1] + 3))
        room[..., : value.shape[-1]] = value
        return room[..., : value.shape[-1]]
    return value
