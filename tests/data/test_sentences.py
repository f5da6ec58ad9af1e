"""Pairs of stretches of sentences: the second one follows, or is from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from graphaccel.data.sentences import ELSEWHERE, FOLLOWS, SentencePairs, SpecialTokens, sentences_of
from graphaccel.data.token_file import TokenFile, TokenWriter
from graphaccel.data.tokenize import tokenize
from graphaccel.errors import BadData

SPECIAL = SpecialTokens(begin=1, separator=2, padding=0)
DOCUMENTS, SENTENCES, WORDS = 20, 9, 5


def token(document: int, place: int) -> int:
    return 10 + document * 100 + place


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    """Each token says its document and its place there."""
    with TokenWriter(tmp_path / "corpus") as writer:
        for document in range(DOCUMENTS):
            places = np.arange(SENTENCES * WORDS).reshape(SENTENCES, WORDS)
            writer.add(*(token(document, 0) + row for row in places))
    return TokenFile(tmp_path / "corpus")


def parts(row: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    ids, kinds = row["input_ids"].tolist(), row["token_type_ids"].tolist()
    used = int(row["attention_mask"].sum())
    first, second = ids.index(2), used - 1
    assert ids[0] == 1
    assert ids[second] == 2
    assert ids[used:] == [0] * (len(ids) - used)
    assert kinds == [int(first < place <= second) for place in range(len(ids))]
    return ids[1:first], ids[first + 1 : second]


def test_a_pair_follows_or_is_of_another_document(tokens: TokenFile) -> None:
    rows = SentencePairs(tokens, 32, SPECIAL, short=0.2, seed=3)
    labels, lengths = [], []
    for number in range(len(rows)):
        row = rows[number]
        a, b = parts(row)
        assert a
        assert b
        for part in (a, b):
            assert part == list(range(part[0], part[0] + len(part)))  # of one document, in order
        documents = {(part[0] - 10) // 100 for part in (a, b)}
        label = int(row["next_sentence_label"])
        assert len(documents) == (1 if label == FOLLOWS else 2)
        if label == FOLLOWS:
            assert a[-1] < b[0]
        labels.append(label)
        lengths.append(len(a) + len(b))
    assert max(lengths) == 29
    assert 0.3 < np.mean(np.array(labels) == ELSEWHERE) < 0.75
    assert min(lengths) < 20


def test_rows_are_the_same_each_time(tokens: TokenFile) -> None:
    rows, again = (SentencePairs(tokens, 32, SPECIAL, seed=1) for _ in range(2))
    other = SentencePairs(tokens, 32, SPECIAL, seed=2)
    assert all(torch.equal(rows[7][name], again[7][name]) for name in rows[7])
    assert any(not torch.equal(rows[i]["input_ids"], other[i]["input_ids"]) for i in range(5))


def test_documents_of_one_sequence_are_refused(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "corpus") as writer:
        writer.add([5, 6, 7])
        writer.add([8, 9])
    with pytest.raises(BadData, match="--split-sentences"):
        SentencePairs(TokenFile(tmp_path / "corpus"), 16, SPECIAL)


def test_a_text_is_tokenized_by_sentences(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, ".": 2, "<end>": 3}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [{"text": "a b. b. a\n\na"}, {"text": "b"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sentences_of(lines[0]["text"]) == ["a b.", "b.", "a", "a"]
    written = tokenize(
        [tmp_path / "text.jsonl"],
        tmp_path / "tokenizer.json",
        tmp_path / "corpus",
        end="<end>",
        split_sentences=True,
    )
    assert written.documents == 2
    file = TokenFile(tmp_path / "corpus")
    assert file.documents.tolist() == [0, 4, 5]
    assert [file[n].tolist() for n in range(5)] == [[0, 1, 2], [1, 2], [0], [0, 3], [1, 3]]
