"""A rank of two that is killed inside a save: the short form of `benchmarks.soak.kills`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.kills import newest
from benchmarks.soak.life import Life

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.mark.release
def test_a_run_of_two_is_resumed_bitwise(tmp_path: Path) -> None:
    life = Life(tmp_path, "--slow", "1", devices=2)
    pids = life.ranks(2)
    life.wait_for("saving 1", life.wait_for("saved 5"))
    seconds = life.kill(pids.pop(1), list(pids.values()))
    assert life.end() != 0
    assert "graphaccel: rank 1 ended first, with signal SIGKILL" in life.text()
    assert seconds < 30
    assert newest(tmp_path) == 5
    resumed = Life(tmp_path, devices=2)
    resumed.wait_for("saved 10", resumed.wait_for("resumed 5"))
    assert resumed.stop() == 75, resumed.text()
    before, after = dict(life.losses()), dict(resumed.losses())
    assert {step: after[step] for step in range(6, 11)} == {
        step: before[step] for step in range(6, 11)
    }
