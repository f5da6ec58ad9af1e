"""What all ranks of a machine can not do is said once; what one can not do, by that one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphaccel.cli.main import main
from graphaccel.errors import GraphMisuse
from graphaccel.runtime import first_error
from graphaccel.runtime.first_error import report_errors_once
from graphaccel.runtime.launch import STOPPED_FILE

WRONG = ["train", "--task", "causal-lm", "--model", "gpt2", "--data", "a", "--lr", "2"]


@pytest.fixture(autouse=True)
def _launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOPPED_FILE, str(tmp_path / "stopped"))
    monkeypatch.setattr(first_error, "_SECONDS", 0.2)


def said(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert main(WRONG) == 1
    return capsys.readouterr().err


def test_the_first_rank_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error[GA418]: `learning_rate` is 2" in said(0, monkeypatch, capsys)
    assert said(1, monkeypatch, capsys) == ""


def test_another_rank_says_what_the_first_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "error[GA418]" in said(1, monkeypatch, capsys)
    (tmp_path / "error").write_text("another error")
    assert "error[GA418]" in said(1, monkeypatch, capsys)
    monkeypatch.delenv(STOPPED_FILE)
    assert "error[GA418]" in said(1, monkeypatch, capsys)


def test_a_script_ends_with_the_traceback_of_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *given: shown.append(given[1]))
    report_errors_once()
    own, other = GraphMisuse(what="the same"), ValueError("torch's")
    for rank, error in ((0, own), (1, own), (1, other), (1, GraphMisuse(what="another"))):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        sys.excepthook(type(error), error, None)
    assert [str(error) for error in shown[:2]] == [str(own), "torch's"]
    assert len(shown) == 3
