"""A resumed run of `graphaccel train` goes on with the rows and the model it began with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphaccel.cli.main import main
from tests.training import corpora

pytestmark = [pytest.mark.filterwarnings("ignore")]

SMALL = ("n_layer=1", "n_embd=16", "n_head=2", "n_positions=32")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def words(data: Path, *more: str) -> list[str]:
    sizes = [word for field in SMALL for word in ("--set", field)]
    return [
        "train", "--task", "causal-lm", "--model", "gpt2", *sizes, "--data", str(data), "--length",
        "16", "--global-batch", "4", "--tokenizer", "bytes", "--output", str(data.parent / "out"),
        "--steps", "3", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a run of two updates, beside its output."""
    data = corpora.help_texts(tmp_path_factory.mktemp("run") / "text.jsonl")
    assert main(words(data, "--steps", "2")) == 0
    return data


@pytest.mark.parametrize(
    ("more", "texts"),
    [
        (["--global-batch", "8"], ["`global_batch` was 4 in", "and is 8", "--global-batch 4  (or"]),
        (["--length", "32"], ["`length` was 16 in", "--length 16"]),
        (["--seed", "1"], ["`seed` was 0 in", "--seed 0"]),
        (["--split", "50,50"], ["`split` was 95,5 in", "--split 95,5"]),
        (["--reset-documents"], ["`reset_documents` was False", "leave --reset-documents out"]),
        (["--set", "n_head=4"], ["`n_head` was 2 in", "--set n_head=2"]),
        (["--steps", "2"], ["has 2 updates, and the run is to have 2", "--steps 4"]),
    ],
)
def test_other_settings_are_refused(
    more: list[str], texts: list[str], begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(begun, "--resume", *more)) == 1
    said = capsys.readouterr().err
    assert "error[GA418]" in said
    for text in texts:
        assert text in said


def test_data_may_move_but_not_change(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = begun.parent / "moved" / begun.name
    moved.parent.mkdir()
    shutil.copy(begun, moved)
    output = ("--output", str(begun.parent / "again"))
    shutil.copytree(begun.parent / "out", output[1])
    with moved.open("a") as file:
        file.write('{"text": "one more"}\n')
    assert main(words(moved, *output, "--resume")) == 1
    assert "`data` was text.jsonl (" in capsys.readouterr().err
    shutil.copy(begun, moved)
    changed = ("--lr", "1e-3", "--set", "resid_pdrop=0.0", "--gradient-accumulation", "2")
    assert main(words(moved, *output, "--resume", *changed)) == 0
