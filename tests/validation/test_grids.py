"""How runs of a grid are ranked, and with predictions corrected on their own times."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.validation.grids import ranking, spearman


def grid(size: int, off: Any = lambda tensor, microbatch: 1.0, **more: Any) -> list[dict[str, Any]]:
    """Runs on 16 devices, predicted to take 1, 2, 3 ... seconds."""
    found = []
    for n in range(size):
        tensor, microbatch = 1 << n % 3, 1 << n // 3
        axes = {"tensor": tensor, "pipeline": 1, "data": 16 // tensor, "context": 1}
        run = {**axes, "interleave": 1, "microbatch": microbatch, "device": "a", "products": ""}
        seconds = (n + 1.0) * off(tensor, microbatch)
        found.append({**run, "predicted_seconds": n + 1.0, "seconds": seconds, **more})
    return found


def test_regret_is_of_the_run_that_is_predicted_to_be_best() -> None:
    runs = grid(3)
    for run, seconds in zip(runs, (3.0, 2.0, 4.0), strict=True):
        run["seconds"] = seconds
    assert ranking(runs) == {"runs": 3, "spearman": 0.5, "regret": 0.5}


def test_what_axes_explain_is_corrected() -> None:
    """A line of the logarithm of tensor ranks, and a parabola."""
    line = ranking(grid(12, lambda tensor, _: tensor**-2.0))
    assert line["spearman"] < 0.9
    for kind in ("line", "parabola"):
        assert line["corrected"][kind] == {"spearman": 1.0, "regret": 0.0}
    bent = ranking(grid(12, lambda tensor, _: 10.0 if tensor == 2 else 1.0))
    assert bent["corrected"]["line"]["spearman"] < 0.9
    assert bent["corrected"]["parabola"] == {"spearman": 1.0, "regret": 0.0}


def test_what_nothing_explains_stays() -> None:
    random.seed(0)
    noise = ranking(grid(24, lambda *_: 10 ** random.uniform(-2, 2)))
    assert noise["corrected"]["parabola"]["spearman"] < 0.9


@pytest.mark.parametrize("runs", [grid(5), [*grid(6), *grid(6, device="b")]])
def test_few_runs_or_several_devices_are_not_corrected(runs: list[dict[str, Any]]) -> None:
    assert "corrected" not in ranking(runs)


def test_ranks_are_correlated() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1.0
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1.0
