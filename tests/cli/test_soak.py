"""A rank of four that is killed inside a save: the short form of `benchmarks.soak.kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.kills import newest
from benchmarks.soak.life import Life

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_a_run_of_four_is_resumed_bitwise(tmp_path: Path) -> None:
    life = Life(tmp_path, "--slow", "1")
    pids = life.ranks(4)
    life.wait_for("saving 2", life.wait_for("saved 5"))
    seconds = life.kill(pids.pop(2), list(pids.values()))
    assert life.end() != 0
    assert "graphaccel: rank 2 ended first, with signal SIGKILL" in life.text()
    assert seconds < 30
    assert newest(tmp_path) == 5
    resumed = Life(tmp_path)
    resumed.wait_for("saved 10", resumed.wait_for("resumed 5"))
    assert resumed.stop() == 75, resumed.text()
    before, after = dict(life.losses()), dict(resumed.losses())
    assert {step: after[step] for step in range(6, 11)} == {
        step: before[step] for step in range(6, 11)
    }
