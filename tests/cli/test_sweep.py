"""`graphaccel plan --sweep`: a table of plans over devices, batch or sequence."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from graphaccel.cli import main as cli

MODEL = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 256), nn.Linear(256, 64)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), ids.flatten())


def job():
    with torch.device("meta"):
        return Words(), torch.zeros(8, 16, dtype=torch.int64)
"""
JOB = ("words.py:job", "--device", "h100-80gb")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "words.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    sys.modules.pop("words", None)
    assert cli.main(["plan", *JOB, *arguments, "--format", "json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["unit"] == "tokens"
    return table["rows"]


def test_devices_are_planned_one_by_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = rows_of(capsys, "--sweep", "devices=1,2,3", "--price", "3.6")
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["rate"] == pytest.approx(8 * 16 / one["seconds"])
    assert one["cost"] == pytest.approx(3.6 * one["seconds"] / 3600 / (8 * 16) * 1e6)
    assert two["cost"] == pytest.approx(2 * 3.6 * two["seconds"] / 3600 / (8 * 16) * 1e6)
    # A batch of 8 is not divided by 3, and the plans that remain are named by the error.
    assert three["reason"].startswith("GA206") or three["devices"] == 3


def test_a_size_has_the_plan_of_its_own_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter, longer = rows_of(capsys, "--sweep", "sequence=16,8192", "--devices", "1")
    assert longer["peak"] > shorter["peak"]
    assert longer["seconds"] > shorter["seconds"]
    (batch,) = rows_of(capsys, "--sweep", "batch=4096", "--devices", "1")
    assert batch["seconds"] == pytest.approx(longer["seconds"], rel=0.05)  # as many tokens
    assert cli.main(["plan", *JOB, "--devices", "1", "--batch", "4096", "--format", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)["plan"]["prediction"]
    assert batch["seconds"] == pytest.approx(alone["seconds"])


def test_text_and_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--sweep", "devices=1,2", "--html", "sweep.html", "--price", "2")
    assert cli.main(["plan", *JOB, *arguments]) == 0
    title, _, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "SWEEP   Words on h100-80gb, by devices; a device costs 2 an hour"
    assert head.split()[:3] == ["devices", "step", "tokens/s"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    page = (folder / "sweep.html").read_text()
    assert page.count('class="bar"') == 4
    assert "width: 100.0%" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "layers=1,2", "--devices", "1"), "'layers' is no axis of a sweep"),
        (("--sweep", "devices=1,x"), "'x' is not a whole number above 0"),
        (("--sweep", "devices=1", "--explain"), "leave --explain out"),
        (("--sweep", "batch=8", "--devices", "1", "--batch", "8"), "leave --batch out"),
        (("--sweep", "devices=1,2", "--devices", "2"), "leave --devices out"),
        (("--sweep", "devices=1,2,1"), "devices=1 is there twice"),
        (("--sweep", "devices=1,2 zero=0,1"), "devices is swept alone"),
        (("--sweep", "zero=0,1", "--devices", "2", "--zero", "1"), "leave --zero out"),
        (("--devices", "1", "--price", "2"), "--price is for the table of --sweep"),
        (("--sweep", "devices=1", "--price", "-2"), "no price above 0"),
    ],
)
def test_what_is_no_sweep_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", *JOB, *arguments])
    assert said in capsys.readouterr().err


def test_a_model_without_a_sequence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "flat.py").write_text(
        "import torch\n\n\ndef job():\n    return torch.nn.Linear(4, 4), torch.zeros(8, 4)\n"
    )
    command = ["plan", "flat.py:job", "--device", "h100-80gb", "--devices", "1"]
    assert cli.main([*command, "--sweep", "sequence=16"]) == 1
    assert "error[GA407]" in capsys.readouterr().err
