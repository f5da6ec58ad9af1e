"""How the global batch of `graphaccel train` is divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from graphaccel.errors import BadTraining
from graphaccel.training.batch import batch_pins
from graphaccel.training.settings import Settings

SETTINGS = Settings(task="causal-lm", model="gpt2", data=("a",), global_batch=48)


@pytest.mark.parametrize(
    ("changes", "pins", "devices", "expected"),
    [
        ({}, {}, 4, {}),
        ({"micro_batch": 6}, {}, 4, {"data": 4, "microbatches": 2}),
        ({"micro_batch": 6}, {"pipeline": 2}, 4, {"data": 2, "microbatches": 4}),
        ({"micro_batch": 6}, {"data": 2}, 8, {"data": 2, "microbatches": 4}),
        ({"micro_batch": 6, "gradient_accumulation": 2}, {}, 4, {"data": 4, "microbatches": 1}),
    ],
)
def test_division(
    changes: dict[str, Any], pins: dict[str, Any], devices: int, expected: dict[str, int]
) -> None:
    assert batch_pins(dataclasses.replace(SETTINGS, **changes), pins, devices) == expected


@pytest.mark.parametrize(
    ("micro", "pins", "text"),
    [
        (
            7,
            {},
            "a step of 48 rows is no multiple of micro batch 7 x 4 data ranks\n"
            "  help: --global-batch 28",
        ),
        (6, {"microbatches": 2}, "`micro_batch` and the pin `microbatches` are both given"),
    ],
)
def test_refused(micro: int, pins: dict[str, Any], text: str) -> None:
    with pytest.raises(BadTraining) as caught:
        batch_pins(dataclasses.replace(SETTINGS, micro_batch=micro), pins, 4)
    assert text in str(caught.value)
