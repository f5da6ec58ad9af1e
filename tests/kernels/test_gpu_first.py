"""The first ten minutes of a GPU: every part is kept, what fails is told, and it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks import gpu_first
from benchmarks.gpu import TOY


def test_a_part_that_fails_does_not_stop_the_next_one() -> None:
    def fails(scale: Any) -> dict[str, Any]:
        raise RuntimeError("out of memory\nmore")

    kept: list[list[str]] = []
    parts = {"first": fails, "second": lambda scale: {"x": 1}}
    found = gpu_first.run_parts(parts, TOY, 60, lambda rows: kept.append(list(rows)))
    assert found["first"]["failed"] == "RuntimeError: out of memory"
    assert found["second"]["x"] == 1
    assert kept == [["first"], ["first", "second"]]


def test_it_ends_at_the_limit() -> None:
    parts = {"long": lambda scale: time.sleep(60) or {}, "next": lambda scale: {}}
    start = time.monotonic()
    found = gpu_first.run_parts(parts, TOY, 0.05, lambda rows: None)
    assert time.monotonic() - start < 30
    assert found["long"]["failed"] == "TimeoutError: no time is left"
    assert found["next"] == {"left out": "0 s had passed"}


@pytest.mark.release
def test_parts_run_at_toy_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["head by chunk", "attention", "NCCL", "host time"]
    assert gpu_first.main(["--dry", "--parts", *names]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: {{" in said for name in names)
    assert '"4":' in said  # tokens of the smallest chunk
    assert '"compile": {"returns":' in said
    assert "NCCL needs a GPU" in said


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_first.main([]) == 1
    assert capsys.readouterr().out.startswith("no CUDA device here: nothing was measured")
