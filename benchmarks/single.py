"""One process: graphaccel against the same model run eagerly. The optimizer step is in both."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    make_batch,
    make_model,
    make_optimizer,
    our_step,
    run,
    time_sides,
)


def _eager(settings: Settings) -> Step:
    model, batch = make_model(settings), make_batch(settings)
    optimizer = make_optimizer(model)

    def step() -> float:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _ours(settings: Settings) -> Step:
    model, batch = make_model(settings), make_batch(settings)
    return our_step(
        model, batch, data=1, pipeline=1, microbatches=1, recompute="none", precision="fp32"
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on the one rank."""
    return time_sides(
        settings, {OURS: partial(_ours, settings), "eager": partial(_eager, settings)}
    )


if __name__ == "__main__":
    run("single", 1, worker)
