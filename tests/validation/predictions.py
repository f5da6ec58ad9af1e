"""Predictions of published runs for tests, with one capture for runs of the same shape of model."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.validation.predict import Predicted, Predictor
from benchmarks.validation.rows import Run


@cache
def _predictor(shape: Any, most: int) -> Predictor:
    return Predictor(most)


def predict(run: Run, most: int = 8) -> Predicted:
    """What `Predictor(most)` predicts for `run`; it keeps its captures for later runs."""
    return _predictor(run.shape, most).predict(run)
