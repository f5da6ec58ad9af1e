"""A pipeline of 2 stages: schedule="zero_bubble" against the same plan with schedule="1f1b"."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.shared.common import (
    OURS,
    Settings,
    Step,
    make_batch,
    make_model,
    our_step,
    run,
    time_sides,
)

WORLD = 2


def _pipeline(settings: Settings, schedule: str) -> Step:
    return our_step(
        make_model(settings, tied=False),
        make_batch(settings),
        data=1,
        pipeline=WORLD,
        schedule=schedule,
        microbatches=settings.microbatches,
        recompute="none",
        precision="fp32",
    )


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on this rank."""
    sides = {
        OURS: partial(_pipeline, settings, "zero_bubble"),
        "1F1B": partial(_pipeline, settings, "1f1b"),
    }
    return time_sides(settings, sides)


if __name__ == "__main__":
    run("zero_bubble", WORLD, worker)
