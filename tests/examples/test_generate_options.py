"""`generate.py` refuses options that it can not follow before it reads the model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt2_pretrain" / "generate.py"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--genfile", "missing/out.jsonl"], "--genfile missing/out.jsonl is a folder, or in none"),
        (["--genfile", "prompts.txt", "--sample-input-file", "./prompts.txt"], "write over"),
        (["--num-samples", "0"], "--num-samples and --out-seq-length are at least 1"),
        (["--out-seq-length", "-1"], "--num-samples and --out-seq-length are at least 1"),
        (["--model", "missing"], "there is no folder missing"),
    ],
)
def test_refused(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a prompt\n")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", ".", *words])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
    assert Path("prompts.txt").read_text() == "a prompt\n"
