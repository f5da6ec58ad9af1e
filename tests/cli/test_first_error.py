"""What all ranks of a machine can not do is said once; what one can not do, by that one."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphaccel.cli.main import main
from graphaccel.runtime import first_error
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
