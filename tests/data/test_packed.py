"""Rows of tokens: beside the documents laid out one after the other by hand."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest
import torch

from graphaccel.data.packed import PackedTokens, ShuffledOrder
from graphaccel.data.token_file import TokenFile, TokenWriter
from graphaccel.errors import BadData

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[]], [[7, 8, 9, 10, 11, 12]]]


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    with TokenWriter(tmp_path / "corpus") as writer:
        for document in DOCUMENTS:
            writer.add(*document)
    return TokenFile(tmp_path / "corpus")


def test_rows(tokens: TokenFile) -> None:
    rows = [{k: v.tolist() for k, v in row.items()} for row in PackedTokens(tokens, 5)]
    assert rows == [
        {
            "input_ids": [1, 2, 3, 4, 5],
            "labels": [-100, 2, 3, 4, -100],
            "position_ids": [0, 1, 2, 3, 0],
        },
        {
            "input_ids": [6, 7, 8, 9, 10],
            "labels": [6, -100, 8, 9, 10],
            "position_ids": [0, 0, 1, 2, 3],
        },
    ]


def test_the_mask_separates_documents(tokens: TokenFile) -> None:
    mask = PackedTokens(tokens, 5, masked=True)[1]["attention_mask"]
    assert mask.dtype == torch.bool
    own = torch.tensor([0, 1, 1, 1, 1])
    same = own[:, None] == own
    assert torch.equal(mask, (same & torch.ones(5, 5).tril().bool())[None])
    both_ways = PackedTokens(tokens, 5, masked=True, causal=False)[1]["attention_mask"]
    assert torch.equal(both_ways, same[None])


def test_parts(tokens: TokenFile) -> None:
    train, valid = PackedTokens(tokens, 1).split("900,300")
    assert (list(train.indices), list(valid.indices)) == ([*range(9)], [*range(9, 12)])


@pytest.mark.parametrize("parts", ["", "a,b", "0,0", "5,-1", "nan,1", "inf,1"])
def test_what_are_no_shares(tokens: TokenFile, parts: str) -> None:
    with pytest.raises(BadData, match="are no shares of its rows"):
        PackedTokens(tokens, 1).split(parts)


@pytest.mark.parametrize(
    ("rows", "more"), [(0, {}), (4, {"rank": 2, "ranks": 2}), (4, {"ranks": 2, "batch": 0})]
)
def test_an_order_without_rows_is_refused(rows: int, more: dict[str, int]) -> None:
    """It would be searched for its first row without end."""
    with pytest.raises(BadData, match="ShuffledOrder"):
        ShuffledOrder(rows, **more)


def test_less_than_a_row(tokens: TokenFile) -> None:
    with pytest.raises(BadData) as caught:
        PackedTokens(tokens, 13)
    assert caught.value.reason == "it has 12 tokens, less than one row of 13"


def test_an_order_is_continued_anywhere() -> None:
    whole = list(islice(ShuffledOrder(7, seed=3), 30))
    assert sorted(whole[:7]) == sorted(whole[7:14]) == [*range(7)]
    assert whole[:7] != whole[7:14]
    for done in range(20):
        assert list(islice(ShuffledOrder(7, seed=3, done=done), 10)) == whole[done : done + 10]
    assert list(islice(ShuffledOrder(7, seed=4), 30)) != whole


def test_parts_of_an_order_are_those_of_each_batch() -> None:
    whole = list(islice(ShuffledOrder(50, seed=3, done=24), 24))
    parts = [
        list(islice(ShuffledOrder(50, seed=3, done=24, rank=rank, ranks=3, batch=2), 8))
        for rank in range(3)
    ]
    assert [row for i in range(0, 8, 2) for part in parts for row in part[i : i + 2]] == whole


def test_loaders_of_the_documents_draw_nothing_of_the_run(tokens: TokenFile) -> None:
    page = Path(__file__).parents[2] / "docs" / "data.md"
    text = page.read_text().partition("## Tokens to rows")[2].partition("\n## ")[0]
    loaders = re.findall(r"^loader = (.*?^\))$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(loaders) == 2
    train = PackedTokens(tokens, 1)
    names = {"torch": torch, "train": train, "order": ShuffledOrder(len(train)), "step": 7}
    state = torch.get_rng_state()
    for loader in loaders:
        next(iter(eval(loader, names | {"ranks": 2})))
    assert torch.equal(torch.get_rng_state(), state)
