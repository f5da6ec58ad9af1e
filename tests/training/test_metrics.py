"""What is measured beside Trainer's logs reaches every writer, on the first rank alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from graphaccel.errors import BadTraining
from graphaccel.training.metrics import Metrics, MetricsBoard, MetricsFile


class Board:
    """In place of TensorBoard's writer."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.flushed = folder, [], 0
        made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushed = len(self.scalars)


made: list[Board] = []


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    made.clear()


def _run(metrics: Metrics, *, first: bool) -> None:
    """Two steps, their log, and that of an evaluation."""
    state = SimpleNamespace(is_world_process_zero=first, global_step=2)
    plan = SimpleNamespace(batch=8)
    handle = SimpleNamespace(
        plan=plan, predicted_step_seconds=0.5, predicted_peak_bytes=100, loss_scale=1024.0,
        utilisation=lambda seconds: 0.25,
    )  # fmt: skip
    metrics.on_train_begin(None, state, None)
    for _ in range(2):
        metrics.on_step_begin(None, state, None)
        metrics.on_step_end(None, state, None)
    model = SimpleNamespace(graphaccel=handle)
    metrics.on_log(None, state, None, logs={"loss": 3.0, "note": "text"}, model=model)
    metrics.on_log(None, state, None, logs={"eval_loss": 4.0}, model=model)


def test_both_get_the_same_numbers(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _run(Metrics([MetricsFile(file, resumes=False), MetricsBoard(tmp_path)], 8, 16), first=True)
    log, evaluation = map(json.loads, file.read_text().splitlines())
    assert log["tokens_per_second"] == pytest.approx(16 * log["rows_per_second"], rel=1e-3)
    assert (log["loss"], log["mfu"], log["loss_scale"]) == (3.0, 0.25, 1024.0)
    assert "seconds" not in evaluation
    (board,) = made
    assert board.folder == str(tmp_path)
    assert board.flushed == len(board.scalars)
    numbers = {k: v for k, v in log.items() if k not in ("step", "note")}
    assert {(n, v, s) for n, v, s in board.scalars if n.startswith("train/")} >= {
        (f"train/{name}", value, 2) for name, value in numbers.items()
    }
    assert ("eval/loss", 4.0, 2) in board.scalars


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _run(Metrics([MetricsFile(file, resumes=False), MetricsBoard(tmp_path)], 8, 16), first=False)
    assert not file.exists()
    assert not made


def test_lines_are_added_where_a_run_resumes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for resumes, lines in ((False, 2), (True, 4), (False, 2)):
        _run(Metrics([MetricsFile(file, resumes=resumes)], 8, None), first=True)
        assert len(file.read_text().splitlines()) == lines
    assert "tokens_per_second" not in file.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_a_full_disk_is_said() -> None:
    file = MetricsFile(Path("/dev/full"), resumes=True)
    with pytest.raises(BadTraining, match=r"`/dev/full` can not be written: No space left"):
        file.write(1, {"loss": 3.0})


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl", resumes=False)
    file.begin()
    file.write(1, {"loss": 3.0})
    assert json.loads(file.file.read_text()) == {"step": 1, "loss": 3.0}
