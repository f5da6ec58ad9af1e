"""Traces the patterns of a fusion: in each dtype, under autocast, as rows, with a matmul."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphaccel.capture.patterns import trace_pattern
from graphaccel.ir.match import Pattern
from graphaccel.kernels.examples import LEADING, example
from graphaccel.kernels.register import parameters
from graphaccel.kernels.spec import Function, Fusion, Scalar, T
from graphaccel.passes.fusion.matmul_bias import with_matmul
from graphaccel.passes.lower_precision import cast_graph

aten = torch.ops.aten
# Numbers in a pattern while it is traced for matching: unlike any other number, and valid
# probabilities where they have to be.
_FLOAT_SENTINEL, _INT_SENTINEL = 0.7310585786300049, 73_105_857


@dataclass(frozen=True)
class Variant:
    """A pattern function as traced: in 32 bits, in 16, or in 16 under autocast. matmul: the one
    whose bias it adds ("linear", "addmm"), or nothing. flat: `...` is one dim: reshapes to rows
    disappear."""

    function: Function
    low: torch.dtype | None
    autocast: bool
    matmul: str = ""
    flat: bool = False


@cache
def example_pattern(fusion: Fusion, variant: Variant) -> Pattern | None:
    """A pattern traced at example shapes, to match by structure; None where the function does not
    take that dtype."""

    def _table(name: str) -> bool:
        spec = fusion.inputs[name]
        return isinstance(spec, T) and (spec.mask or (spec.broadcast and not spec.differentiable))

    leading = (math.prod(LEADING),) if variant.flat else LEADING
    values = example(fusion, variant.low or torch.float32, leading=leading)
    for i, (name, spec) in enumerate(fusion.inputs.items()):
        if isinstance(spec, Scalar) and isinstance(spec.default, float):
            values[name] = _FLOAT_SENTINEL + i / 64
        elif isinstance(spec, Scalar) and not isinstance(spec.default, bool):
            values[name] = _INT_SENTINEL + i
    if (
        variant.autocast and not variant.matmul
    ):  # weights stay wide, and masks and tables that the model computes
        values = {
            n: v.float()
            if isinstance(v, Tensor) and v.is_floating_point() and (v.dim() == 1 or _table(n))
            else v
            for n, v in values.items()
        }
    return traced(fusion, variant, values, exact=False)


def traced(
    fusion: Fusion, variant: Variant, values: Mapping[str, Any], *, exact: bool
) -> Pattern | None:
    """The pattern at some values; None where the function does not take them. exact: numbers must
    be equal to those of the pattern."""
    names = parameters(variant.function)
    arguments = {n: values[n] for n in names}
    try:
        pattern = trace_pattern(variant.function, arguments)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # it does not take these shapes or dtypes
    if variant.autocast:
        assert variant.low is not None
        cast_graph(pattern.graph, variant.low)
    if variant.matmul:
        pattern = with_matmul(fusion, pattern, variant.matmul)
    return Pattern(pattern.graph, {}) if exact and pattern is not None else pattern


def reshapes_to_rows(fusion: Fusion, pattern: Pattern) -> bool:
    """Whether a pattern reshapes, and its inputs may have any dims before the last."""
    any_leading = any("..." in spec.indices for spec in fusion.tensors.values())
    return any_leading and any(n.target is aten.reshape.default for n in pattern.graph.nodes)


def pattern_text(pattern: Pattern) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in pattern.graph.nodes)
