"""The full text of every error about training data and settings."""

from __future__ import annotations

import pytest

from graphaccel import errors

CASES = [
    (
        errors.BadData(
            place="text.jsonl:8",
            reason="it is no object with a text as 'text'",
            help_line="mend the line, or count such lines and go on:  --skip-bad-lines",
        ),
        """\
error[GA417]: `text.jsonl:8` can not be used as training data
  why:  it is no object with a text as 'text'
  help: mend the line, or count such lines and go on:  --skip-bad-lines
  explain: graphaccel explain GA417""",
    ),
    (
        errors.BadTraining(
            what="`gpt22` is no folder, no file and no model type of transformers",
            help_line="--model gpt2",
        ),
        """\
error[GA418]: `gpt22` is no folder, no file and no model type of transformers
  help: --model gpt2
  explain: graphaccel explain GA418""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda x: getattr(x, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text
