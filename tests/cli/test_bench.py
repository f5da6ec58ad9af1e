"""`graphaccel bench` and sweeps over pins: every combination, and plain PyTorch beside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from graphaccel.cli import main as cli
from graphaccel.cli.pin_options import pin_grid, pins_text
from graphaccel.report.bench import BenchmarkRow, BenchmarkTable, benchmark_picture, benchmark_text
from tests.cli.test_sweep import MODEL

TRAINED = """

def trained():
    model = Words()
    return model, torch.zeros(8, 16, dtype=torch.int64), None, torch.optim.AdamW(model.parameters())
"""
ROOT = Path(__file__).parents[2]
PLAIN = BenchmarkRow("plain", batch=8, seconds=(2.0, 2.0, 2.0), memory=100)
FAST = BenchmarkRow("zero 0", "data 2", 8, (1.0, 0.5, 2.0), 60, 0.9, 60)
NONE = BenchmarkRow("zero 1", reason="GA210: no")
TABLE = BenchmarkTable("Words", "2 processes", 3, PLAIN, (FAST, NONE), 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "words.py").write_text(MODEL + TRAINED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sys.modules.pop("words", None)
    return tmp_path


def test_combinations_are_in_order() -> None:
    assert pin_grid("zero=0,1 recompute=none,all") == (
        {"zero": 0, "recompute": "none"}, {"zero": 0, "recompute": "all"},
        {"zero": 1, "recompute": "none"}, {"zero": 1, "recompute": "all"},
    )  # fmt: skip
    assert pins_text({"zero": 1, "sequence": False}) == "zero 1, sequence off"
    stages = pin_grid("stage_of=h.3=1,h.2=1 sequence=on,false bucket_bytes=1MiB compile=off")
    assert stages[0] == {
        "stage_of": {"h.3": 1}, "sequence": True, "bucket_bytes": 2**20, "compile": "off"
    }  # fmt: skip
    assert pins_text(stages[3]).startswith("stage_of h.2=1, sequence off")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "words.py:job", "--sweep", "zerro=0,1"], "there are zero"),
        (["bench", "words.py:job", "--sweep", "zero"], "'zero=' is not like"),
        (["bench", "words.py:job", "--sweep", " "], "nothing to sweep over"),
        (["bench", "words.py:job", "--sweep", "zero=0 zero=1"], "zero is there twice"),
        (["bench", "words.py:job", "--sweep", "zero=0,1,0"], "zero=0 is there twice"),
        (["bench", "words.py:job", "--sweep", "zero=0,9"], "'9'; it can be 0, 1, 2, 3"),
        (["bench", "words.py:job", "--sweep", "zero=0..3"], "zero can not be '0..3'"),
        (["bench", "words.py:job", "--sweep", "tensor=1,1.5"], "'1.5' is not a whole number"),
        (["bench", "words.py:job", "--sweep", "precision=fp7"], "it can be fp32, bf16"),
        (["bench", "words.py:job", "--sweep", "offload=x"], "it can be none, optimizer"),
        (["bench", "words.py:job", "--sweep", "sequence=maybe"], "it can be true, false"),
        (["bench", "words.py:job", "--sweep", "zero=0,1", "--zero", "1"], "leave --zero out"),
        (["bench", "words.py:job", "--sweep", "zero=0,1", "--baseline", "zero=2"], "zero 2 is no"),
    ],
)
def test_what_is_no_sweep_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert said in capsys.readouterr().err


def test_pins_are_planned_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--sweep", "data=1,2 tensor=1,2", "--devices", "2", "--device", "h100-80gb")
    assert cli.main(["plan", "words.py:job", *sweep, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["size"] for row in rows] == [
        "data 1, tensor 1", "data 1, tensor 2", "data 2, tensor 1", "data 2, tensor 2"
    ]  # fmt: skip
    assert ["tensor 2" in row["plan"] for row in rows] == [False, True, False, False]
    assert "data 2" in rows[2]["plan"]
    assert rows[3]["reason"].startswith("GA2")
    assert cli.main(["plan", "words.py:job", "--sweep", "tensor=3", *sweep[2:]]) == 3
    assert "2 devices can not be shared evenly by 3" in capsys.readouterr().out


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for CPU processes")
def test_plans_run_beside_plain_pytorch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "words.py:trained", "--devices", "2", "--sweep", "zero=1", "--steps", "3"]
    files = ["--json", "bench.json", "--svg", "bench.svg", "--baseline", "zero=1", "--data", "2"]
    assert cli.main([*words, *files]) == 0
    table = json.loads((folder / "bench.json").read_text())
    (one,) = table["rows"]
    for row in (one, table["plain"]):
        assert len(row["seconds"]) == 3
        assert row["samples_per_second"] == pytest.approx(8 / sorted(row["seconds"])[1])
    assert one["memory"] == pytest.approx(one["predicted_memory"], rel=0.02)
    assert one["of_plain"] == pytest.approx(
        one["samples_per_second"] / table["plain"]["samples_per_second"]
    )
    assert one["of_baseline"] == 1.0
    assert "baseline: zero 1" in capsys.readouterr().out
    ElementTree.parse(folder / "bench.svg")


def test_text_compares_with_both() -> None:
    title, _, head, plain, fast, none, _, notes = benchmark_text(TABLE).splitlines()
    assert title == "BENCH   Words, 3 steps each, 2 processes"
    assert "of baseline" in head
    assert plain.split()[:5] == ["plain", "4.00", "±", "0.00", "1.00"]
    assert fast.split()[2:7] == ["8.00", "±", "6.00", "2.00", "1.00"]
    assert none.split()[2:4] == ["-", "GA210:"]
    assert notes.endswith("baseline: zero 0")


def test_the_picture_has_a_bar_for_what_ran() -> None:
    root = ElementTree.fromstring(benchmark_picture(TABLE))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "plain" in texts
    assert "zero 0" in texts
    assert "zero 1" not in texts


def test_table_and_picture_of_the_document_are_of_the_committed_figures() -> None:
    """`graphaccel bench` wrote the three of them."""
    table = BenchmarkTable.from_json((ROOT / "docs/pictures/bench.json").read_text())
    assert benchmark_text(table) in (ROOT / "docs/planning.md").read_text()
    assert benchmark_picture(table) == (ROOT / "docs/pictures/bench.svg").read_text()
    assert len([row for row in table.rows if row.seconds]) == 6
    assert BenchmarkTable.from_json(table.to_json()) == table
