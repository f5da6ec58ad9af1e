"""JSON lines to tokens: in order, whatever the number of processes; bad lines by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from graphaccel.cli.main import main
from graphaccel.data.token_file import TokenFile
from graphaccel.data.tokenize import Written, tokenize
from graphaccel.errors import BadData

TEXTS = [f"a line of {'many ' * (i % 7)}words {i % 10}" for i in range(40)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["?", "<end>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def lines(tmp_path: Path, *more: str) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join([*(json.dumps({"text": t}) for t in TEXTS), *more]))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_in_order(
    tmp_path: Path, tokenizer: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphaccel.data.tokenize._CHUNK", 200)  # several chunks
    prefix = tmp_path / "corpus"
    written = tokenize([lines(tmp_path)], tokenizer, prefix, end="<end>", workers=workers)
    plain = Tokenizer.from_file(str(tokenizer))
    expected = [[*plain.encode(text).ids, 1] for text in TEXTS]
    assert [row.tolist() for row in TokenFile(prefix)] == expected
    assert written == Written(40, sum(map(len, expected)), 0)


def test_bad_lines_have_numbers(tmp_path: Path, tokenizer: Path) -> None:
    file = lines(tmp_path, '{"text": "cut o', '{"title": "no text"}', '{"text": "a line"}')
    with pytest.raises(BadData) as caught:
        tokenize([file], tokenizer, tmp_path / "corpus")
    assert caught.value.place == f"{file}:41"
    assert not list(tmp_path.glob("corpus*"))
    written = tokenize([file], tokenizer, tmp_path / "corpus", skip_bad_lines=True)
    assert (written.documents, written.skipped) == (41, 2)


@pytest.mark.parametrize("content", ["{", "{}", "\x00", ""])
def test_a_file_that_is_no_tokenizer(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(BadData, match="it is no tokenizer of the `tokenizers` library") as caught:
        tokenize([lines(tmp_path)], file, tmp_path / "corpus")
    assert caught.value.place == str(file)
    assert not list(tmp_path.glob("corpus*"))


def test_the_command(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(lines(tmp_path)), "--tokenizer", str(tokenizer.parent)]
    assert main(["tokenize", *given, "--output", str(tmp_path / "corpus")]) == 0
    assert capsys.readouterr().out.endswith(
        "corpus.bin: 40 documents, 315 tokens; 0 lines skipped\n"
    )
    assert main(["tokenize", *given, "--output", "corpus", "--end", "<none>"]) == 1
    assert capsys.readouterr().err == (
        f"error[GA417]: `{tokenizer}` can not be used as training data\n"
        "  why:  it has no token '<none>'\n"
        "  help: leave the end token out, or add it:  tokenizer.add_special_tokens(['<none>'])\n"
        "  explain: graphaccel explain GA417\n"
    )
