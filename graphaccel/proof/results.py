"""The results of one training step, from eager code or a graph, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OWN_BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference between two computations of one tensor, ‖a - b‖ / ‖b‖, by dtype.

Two orders of summation differ by a few rounding units (6e-8 in float32, 1e-16 in float64) times the
root of the number of terms, and by the conditioning of what follows: zoo models are at 1e-7 and
1e-15. A float32 result above its bound is not conclusive: the comparison is repeated in float64,
where a different formula is a million times above rounding. Narrower dtypes are only compared
there.
"""
_FLOOR = {torch.float64: 1e-13, torch.float32: 1e-7}
"""Relative to the largest gradient: a gradient that is mathematically zero (the bias of attention's
keys) is the rounding of terms that cancel. Of a buffer: relative to the
terms that it is a sum of (`Results.magnitudes`), as in the mean of what a BatchNorm has centred."""
_FEW = 1024
"""Elements in which a finite number is looked for before all of a tensor."""
_SAFE = 1e-12
"""A float32 norm below it may have lost squares below the dtype's range."""


@dataclass(frozen=True)
class Results:
    """Values of one step, full and detached, or what was kept of each (`run_graph(keep=)`).

    loss: None where the script computes it. outputs: floating-point tensors by leaf of what the
    model returned. gradients: by parameter; tied ones by the first of their names. inputs:
    gradients by batch leaf. buffers: new values of those that changed, and of parameters that a
    forward wrote. strangers: shapes of leaves that get a gradient and are not parameters of the
    model. magnitudes: of the graph's buffers that are sums, norms of the sums of absolute values.
    """

    loss: Tensor | None
    outputs: Mapping[int, Tensor]
    gradients: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    strangers: tuple[tuple[int, ...], ...] = field(default=())
    magnitudes: Mapping[str, float] = field(default_factory=dict)


def kept_of(results: Results, keep: Callable[[Tensor], Any]) -> Results:
    """The results with each tensor reduced by `keep`, as by `run_graph`."""

    def each(values: Mapping[Any, Tensor]) -> dict[Any, Any]:
        return {key: keep(value) for key, value in values.items()}

    return Results(
        None if results.loss is None else keep(results.loss),
        each(results.outputs),
        each(results.gradients),
        each(results.inputs),
        each(results.buffers),
        magnitudes=results.magnitudes,
    )


@dataclass(frozen=True)
class Deviation:
    """How far one value of a graph is from eager's. error: ‖graph - eager‖ / ‖eager‖; inf where one
    has no such value or another shape. missing: which one has none ("graph" or "eager").

    kind: "loss", "output", "gradient" or "buffer". void: why the comparison says nothing even if
    the values are equal: "not finite", "zero" (or below the rounding of the largest gradient) or
    "empty". overflow: the graph has infinities or NaNs where eager code has numbers.
    """

    what: str
    error: float
    bound: float
    missing: str = ""
    kind: str = ""
    void: str = ""
    overflow: bool = False

    @property
    def wrong(self) -> bool:
        return not self.error <= self.bound

    def __str__(self) -> str:
        if self.missing:
            return f"{self.what}: {self.missing} has none"
        return f"{self.what}: off by {self.error:.1e}"


def shown(error: float) -> str:
    """A relative error as text."""
    return f"{error:.1e}" if error else "exactly"


def deviations(graph: Results, eager: Results, dtype: torch.dtype) -> tuple[Deviation, ...]:
    """Deviations of loss, outputs, gradients and buffers. dtype: of the computation."""
    bound = OWN_BOUND[dtype]
    norms = {id(g): norm_of(g) for g in (*eager.gradients.values(), *eager.inputs.values())}
    floor = _FLOOR[dtype] * max((n for n in norms.values() if math.isfinite(n)), default=0.0)
    written = {f"new value of `{n}`": _FLOOR[dtype] * m for n, m in graph.magnitudes.items()}
    collected = list(_missing_parameters(eager))
    pairs = (
        *_pairs("loss", "loss", _only(graph.loss), _only(eager.loss)),
        *_pairs("output", "output", graph.outputs, eager.outputs),
        *_pairs("gradient", "gradient of", graph.gradients, eager.gradients),
        *_pairs("gradient", "gradient of input", graph.inputs, eager.inputs),
        *_pairs("buffer", "new value of", graph.buffers, eager.buffers),
    )
    for kind, what, ours, theirs in pairs:
        if ours is None or theirs is None or ours.shape != theirs.shape:
            missing = "graph" if ours is None else "eager" if theirs is None else ""
            collected.append(Deviation(what, math.inf, bound, missing, kind))
            continue
        size = norms.get(id(theirs))
        least = written.get(what, 0.0) if size is None else floor
        error, overflow = _relative(ours, theirs, size, least / bound)
        void = _void(theirs, kind, size, least)
        collected.append(Deviation(what, error, bound, "", kind, void, overflow))
    return tuple(collected)


def _void(eager: Tensor, kind: str, size: float | None, floor: float) -> str:
    """Why a graph with these values need not be right. size: norm of a gradient; floor: below it a
    gradient is rounding."""
    if not eager.numel():
        return "empty"
    if size is not None:
        return "not finite" if not math.isfinite(size) else "zero" if size <= floor else ""
    if kind == "loss":
        return "" if bool(torch.isfinite(eager).all()) else "not finite"
    some = eager.reshape(-1)[:_FEW]
    odd = not bool(torch.isfinite(some).any()) and not bool(torch.isfinite(eager).any())
    return "not finite" if odd else ""


def _missing_parameters(eager: Results) -> Iterator[Deviation]:
    for shape in eager.strangers:
        what = f"gradient of a parameter of shape {list(shape)} that is not one of the model's"
        yield Deviation(what, math.inf, 0.0, "graph")


def _only(value: Tensor | None) -> dict[str, Tensor]:
    return {} if value is None else {"": value}


def _pairs(
    kind: str, what: str, graph: Mapping, eager: Mapping
) -> Iterator[tuple[str, str, Tensor | None, Tensor | None]]:
    for key in dict.fromkeys((*eager, *graph)):
        name = f"`{key}`" if isinstance(key, str) and key else key
        yield kind, f"{what} {name}".strip(), graph.get(key), eager.get(key)


def norm_of(value: Tensor) -> float:
    """Computed in float32 where squares are in range, five times quicker than in float64."""
    if value.dtype == torch.float32:
        norm = float(torch.linalg.vector_norm(value))
        if _SAFE < norm < math.inf:
            return norm
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _relative(ours: Tensor, theirs: Tensor, size: float | None, least: float) -> tuple[float, bool]:
    """‖ours - theirs‖ over the norm of theirs, or over `least` if that is more; and whether ours
    has infinities or NaNs where theirs has numbers. At the same positions in both they are equal.

    size: the norm of theirs, where known.
    """
    if not ours.numel() or torch.equal(ours, theirs):
        return 0.0, False
    if not ours.is_floating_point():
        return math.inf, False
    difference, whole = ours - theirs, theirs
    error = norm_of(difference)
    if not math.isfinite(error):
        odd = ~torch.isfinite(difference)
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if not bool(same[odd].all()):
            return math.inf, bool(torch.isfinite(theirs[~torch.isfinite(ours)]).any())
        difference, whole, size = difference[~odd], whole[~odd], None
        error = norm_of(difference)
    size = max(norm_of(whole) if size is None else size, least)
    return (error / size if size else (0.0 if error == 0.0 else math.inf)), False
