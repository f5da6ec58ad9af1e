"""Values that differ by what rounding alone changes are not refused; others are."""

from __future__ import annotations

from typing import Any

import pytest

from graphaccel.errors import PlanDiffers
from graphaccel.proof.planned import Expected

VALUES = {f"gradient of `{name}`": (1.0, 0.0) for name in "abcde"}


class Alone:
    """The mesh of one rank."""

    world = 1


def _check(norms: dict[str, float], own: dict[int, dict[str, float]]) -> tuple[str, list[range]]:
    """Why a step with these norms of gradients proves nothing, and which draws were made. own: seed
    → relative error of one device's own values."""
    asked = []

    def rounding(seeds: range) -> dict[str, float]:
        asked.append(seeds)
        drawn = [own.get(seed, {}) for seed in seeds]
        return {n: max(one.get(n[-2], 1e-3) for one in drawn) for n in VALUES}

    step: dict[str, Any] = {n: ((0,), norms.get(n[-2], 1.0) ** 2, 0.0) for n in VALUES}
    expected = Expected("plan", "float32", VALUES)
    return expected.check(step, Alone(), rounding), asked  # type: ignore[arg-type]


def test_a_few_draws_explain_it() -> None:
    said, asked = _check({"a": 1.003}, {})
    assert said == "rounding alone changes one device's own values by 1.0e-03"
    assert asked == [range(4)]


def test_more_draws_where_a_few_do_not() -> None:
    said, asked = _check({"a": 1.006}, {9: {"a": 2e-3}})
    assert said == "rounding alone changes one device's own values by 2.0e-03"
    assert asked == [range(4), range(4, 16)]


def test_what_no_draw_explains_is_refused() -> None:
    with pytest.raises(PlanDiffers, match=r"gradient of `a`: off by 6\.0e-03"):
        _check({"a": 1.006}, {9: {"b": 2e-3}})
