"""What is written of pins is what their fields say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from graphaccel.planner.plan.pin_types import PinArguments
from graphaccel.planner.plan.pins import NAMES, PINS, Pins
from tests.support.documents import docs_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return docs_script("pins")


def test_the_page_is_that_of_the_fields(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/pins.py"


def test_the_types_are_those_of_the_fields(script: ModuleType) -> None:
    assert script.TYPES.read_text(encoding="utf-8") == script.types(), "run python docs/pins.py"


def test_every_pin_is_in_all_of_it(script: ModuleType) -> None:
    assert tuple(get_type_hints(PinArguments)) == NAMES
    assert {pin.group for pin in PINS.values()} == set(script.GROUPS)
    assert set(Pins.__dataclass_fields__) == {*NAMES, "spared"}
    for name in NAMES:
        assert script.page().count(f"| `{name}` |") == 1
