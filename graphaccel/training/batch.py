"""Divides the global batch of `graphaccel train`: micro batch, data ranks, microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphaccel.errors import BadTraining
from graphaccel.training.settings import Settings

_OTHER_AXES = ("tensor", "pipeline", "context", "expert")


def batch_pins(settings: Settings, pins: Mapping[str, Any], devices: int) -> dict[str, int]:
    """The pins that `micro_batch` stands for: rows of a step = micro x data ranks x microbatches.

    Raises BadTraining (GA418) where this has no whole number.
    """
    if settings.micro_batch is None:
        return {}
    if "microbatches" in pins:
        raise BadTraining(
            what="`micro_batch` and the pin `microbatches` are both given",
            help_line=f"--microbatches {pins['microbatches']}",
        )
    ranks = pins.get("data")
    if ranks is None:
        others = math.prod(pins.get(axis, 1) for axis in _OTHER_AXES)
        ranks = max(1, devices // others)
    batch = settings.global_batch // settings.gradient_accumulation
    count, rest = divmod(batch, settings.micro_batch * ranks)
    if rest or not count:
        smallest = settings.micro_batch * ranks * settings.gradient_accumulation
        fitting = max(smallest, settings.global_batch // smallest * smallest)
        raise BadTraining(
            what=f"a step of {batch} rows is no multiple of micro batch {settings.micro_batch} x "
            f"{ranks} data ranks",
            help_line=f"--global-batch {fitting}",
        )
    return {"data": ranks, "microbatches": count}
