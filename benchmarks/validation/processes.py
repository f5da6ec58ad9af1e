"""Predictions of many runs, in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from typing import Any, TypeAlias

from benchmarks.validation import fit
from benchmarks.validation.predict import Predicted, Predictor
from benchmarks.validation.rows import Run
from graphaccel.errors import GraphAccelError

Result: TypeAlias = tuple[Run, dict[str, Any], fit.Sample | None]


def results(runs: Sequence[Run], most: int, processes: int) -> Iterator[Result]:
    """Each run with what is known of it, in as many processes, one model at a time in each. most:
    devices of the largest run."""
    models = [list(same) for _, same in groupby(runs, key=lambda run: run.shape)]
    models.sort(key=lambda same: -same[0].layers)  # the slowest first
    if processes == 1:
        for same in models:
            yield from _of_model(most, same)
        return
    with get_context("spawn").Pool(processes, maxtasksperchild=10) as pool:
        for found in pool.imap_unordered(partial(_of_model, most), models):
            yield from found


def _of_model(most: int, runs: Sequence[Run]) -> list[Result]:
    predictor = Predictor(most)
    results: list[Result] = []
    for run in runs:
        found, predicted = _predicted(predictor, run)
        results.append((run, found, None if predicted is None else fit.sample(run, predicted)))
    return results


def _predicted(predictor: Predictor, run: Run) -> tuple[dict[str, Any], Predicted | None]:
    try:
        found = predictor.predict(run)
    except GraphAccelError as error:
        return {**_said(run), "refused": error.message().sentence}, None
    assert found.plan.prediction is not None
    parts = {
        name: getattr(found.plan.prediction, name)
        for name in ("compute", "communication", "bubble", "optimizer")
    }
    result = {
        **_said(found.run),
        "predicted_seconds": found.seconds,
        "predicted_memory": found.memory,
        "verdict": found.verdict,
        "parts": parts,
    }
    return result, found


def _said(run: Run) -> dict[str, Any]:
    return {k: v for k, v in asdict(run).items() if k != "system"}
