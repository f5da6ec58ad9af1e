"""How runs of one model on one number of devices are ranked, and when corrected on their own times.

A grid may have little order that a prediction could find: of equal work the host was slower at one
place than at another, or the network. A sign of it are the same predictions, corrected on the very
times of that grid: by what depends on its axes and the size of its microbatches as a line or a
parabola of their logarithms does, fitted by least squares of logarithms. That is no bound: the fit
is of times, not of ranks, and may put a grid out of order that was in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

_AXES = ("tensor", "pipeline", "data", "context", "interleave", "microbatch")
DEGREES: Mapping[str, int] = MappingProxyType({"line": 1, "parabola": 2})
_RUNS_EACH = 2
"""Runs for each coefficient, without which a fit says nothing."""


def ranking(grid: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of runs with their predictions: how many; Spearman's rank correlation; regret, how much
    slower than the best run is the one that is predicted to be best; and "corrected", the same of
    corrected predictions, where there are enough runs for it, all of one kind of device and
    precision."""
    found = _ranked(grid, [run["predicted_seconds"] for run in grid])
    corrected = {}
    for name, degree in DEGREES.items():
        predicted = _corrected(grid, degree)
        if predicted is not None:
            corrected[name] = _ranked(grid, predicted)
    return {"runs": len(grid), **found, **({"corrected": corrected} if corrected else {})}


def _ranked(grid: Sequence[dict[str, Any]], predicted: Sequence[float]) -> dict[str, float]:
    measured = [run["seconds"] for run in grid]
    chosen = measured[list(predicted).index(min(predicted))]
    return {"spearman": spearman(predicted, measured), "regret": chosen / min(measured) - 1}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the ranks, without what rounding adds; equal values are ranked in their
    order."""
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 12)


def _corrected(grid: Sequence[dict[str, Any]], degree: int) -> list[float] | None:
    """Predictions with what a polynomial of `degree` in the logarithms of each axis says, fitted on
    the grid's own times; None of too few runs, or several kinds of them."""
    columns = [np.ones(len(grid))]
    logs = [np.log([float(run[axis]) for run in grid]) for axis in _AXES]
    for power in range(1, degree + 1):
        for log in logs:
            wider = np.stack([*columns, log**power])
            if np.linalg.matrix_rank(wider) == len(wider):
                columns.append(log**power)
    kinds = {(run["device"], run["products"]) for run in grid}
    if len(grid) < _RUNS_EACH * len(columns) or len(kinds) > 1:
        return None
    matrix = np.stack(columns, 1)
    off = np.array([math.log(run["seconds"] / run["predicted_seconds"]) for run in grid])
    told = matrix @ np.linalg.lstsq(matrix, off, rcond=None)[0]
    pairs = zip(grid, told.tolist(), strict=True)
    return [run["predicted_seconds"] * math.exp(more) for run, more in pairs]
