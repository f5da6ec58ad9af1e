"""Lines of JSON as editors and other systems write them, and files that hold none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from graphaccel.data.json_lines import lines_of, object_of, text_of
from graphaccel.data.tokenize import tokenize
from graphaccel.errors import BadData

LINE = '{"text": "a line"}'


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({"?": 0, "a line": 1}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize(
    "content",
    [
        f"{LINE}\n{LINE}\n",
        f"{LINE}\r\n{LINE}\r\n",
        f"\ufeff{LINE}\n{LINE}",
        f"\n{LINE}\n  \n\n{LINE}\n\n",
    ],
)
def test_as_others_write_them(content: str, tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content.encode())
    texts = [text_of(object_of(line), "text") for _, line in lines_of(file)]
    assert texts == ["a line", "a line"]
    assert tokenize([file], tokenizer, tmp_path / "corpus").documents == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9"}', "codec can't decode byte 0xe9"),
        (b'{"text": "\\ud800"}', r"has \\ud800, half of a character"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[{}]", "an array"),
    ],
)
def test_lines_that_hold_no_text(
    line: bytes,
    reason: str,
    tmp_path: Path,
    tokenizer: Path,
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(f"\n{LINE}\n".encode() + line)
    with pytest.raises(BadData, match=reason) as caught:
        tokenize([file], tokenizer, tmp_path / "corpus")
    assert caught.value.place == f"{file}:3"
    assert tokenize([file], tokenizer, tmp_path / "corpus", skip_bad_lines=True).skipped == 1


def test_files_that_hold_no_lines(tmp_path: Path, tokenizer: Path) -> None:
    packed = tmp_path / "a.jsonl"
    packed.write_bytes(gzip.compress(LINE.encode()))
    for path, reason in (
        (packed, "compressed"),
        (tmp_path, "a folder"),
        (tmp_path / "b", "no such"),
    ):
        with pytest.raises(BadData, match=reason):
            tokenize([path], tokenizer, tmp_path / "corpus")
        with pytest.raises(BadData, match=reason):
            next(lines_of(path))
