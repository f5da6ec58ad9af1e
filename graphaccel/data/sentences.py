"""Pairs of stretches of sentences, of which the second follows the first or is from elsewhere.

As BERT is pretrained (Devlin et al., BERT, 2018, §3.1 and A.2): half of the second stretches are
what follows, the others are of another document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from graphaccel.data.token_file import TokenFile
from graphaccel.errors import BadData

FOLLOWS, ELSEWHERE = 0, 1
"""Values of `next_sentence_label`, as transformers has them."""
_END = re.compile(r"(?<=[.!?])\s+|\n{2,}")


def sentences_of(text: str) -> list[str]:
    """The sentences of a text: they end at a mark with a blank behind it, or at an empty line."""
    return [part for part in (piece.strip() for piece in _END.split(text)) if part] or [text]


@dataclass(frozen=True)
class SpecialTokens:
    """What a row begins with, what ends each of its two parts, and what fills it."""

    begin: int
    separator: int
    padding: int

    @property
    def all(self) -> tuple[int, ...]:
        return self.begin, self.separator, self.padding


@dataclass(frozen=True)
class _Stretch:
    """Sentences `first` to `last` (not included) of a document; at most `most` tokens are used."""

    document: int
    first: int
    last: int
    most: int


class SentencePairs(Dataset):
    """A row is `begin A separator B separator padding`, a dict of tensors of `length` int64:
    `input_ids`, `token_type_ids` (0 in A, 1 in B), `attention_mask` (0 at padding), and
    `next_sentence_label`, a number: 0 where B follows A, 1 where it is of another document.

    tokens: a sequence for each sentence (`graphaccel tokenize --split-sentences`). short: the share
    of rows of a smaller length, drawn from 2 on. The choices depend on seed and row alone.

    Raises BadData (GA417) for documents of one sequence each, and for a single document.
    """

    def __init__(
        self,
        tokens: TokenFile,
        length: int,
        special: SpecialTokens,
        *,
        short: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.tokens, self.length, self.special, self.seed = tokens, length, special, seed
        self._bounds = np.asarray(tokens.documents)
        several = np.diff(self._bounds) > 1
        if len(several) < 2 or not several.any():
            raise BadData(
                place=str(tokens.prefix),
                reason="its documents are one sequence each" if len(several) > 1 else
                "it has one document, and other sentences come from another",
                help_line="graphaccel tokenize text.jsonl --tokenizer tokenizer.json --output "
                f"{tokens.prefix} --split-sentences",
            )  # fmt: skip
        self._stretches = tuple(self._cut(short))

    def _cut(self, short: float) -> Iterator[_Stretch]:
        """The documents in stretches of as many sentences as fill a row."""
        generator = np.random.default_rng((self.seed, 0))
        lengths, whole = np.asarray(self.tokens.lengths), self.length - 3
        for document in range(len(self._bounds) - 1):
            first, end = int(self._bounds[document]), int(self._bounds[document + 1])
            while first < end:
                small = generator.random() < short
                most = int(generator.integers(2, whole + 1)) if small else whole
                last, held = first, 0
                while last < end and held < most:
                    held += int(lengths[last])
                    last += 1
                if held > 1:
                    yield _Stretch(document, first, last, most)
                first = last

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._stretches)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """The tensors of a row."""
        if not 0 <= row < len(self._stretches):
            raise IndexError(row)
        stretch = self._stretches[row]
        generator = np.random.default_rng((self.seed, 1, row))
        count = stretch.last - stretch.first
        cut = stretch.first + (int(generator.integers(1, count)) if count > 1 else 1)
        a = self._read(stretch.first, cut)
        follows = count > 1 and generator.random() < 0.5
        if follows:
            b = self._read(cut, stretch.last)
        else:
            b = self._elsewhere(stretch, max(1, stretch.most - len(a)), generator)
        a, b = _shortened(a, b, stretch.most, generator)
        return self._row(a, b, FOLLOWS if follows else ELSEWHERE)

    def _elsewhere(
        self, stretch: _Stretch, most: int, generator: np.random.Generator
    ) -> np.ndarray:
        """At most so many tokens of another document, from one of its sentences on."""
        documents = len(self._bounds) - 1
        other = (stretch.document + int(generator.integers(1, documents))) % documents
        first, end = int(self._bounds[other]), int(self._bounds[other + 1])
        begin = int(generator.integers(first, end))
        last, held = begin, 0
        while last < end and held < most:
            held += int(self.tokens.lengths[last])
            last += 1
        return self._read(begin, last)

    def _read(self, first: int, last: int) -> np.ndarray:
        return np.concatenate([self.tokens[n] for n in range(first, last)]).astype(np.int64)

    def _row(self, a: np.ndarray, b: np.ndarray, label: int) -> dict[str, torch.Tensor]:
        begin, separator, padding = self.special.all
        ids = np.concatenate([[begin], a, [separator], b, [separator]])
        used, kinds = len(ids), np.zeros(self.length, np.int64)
        kinds[len(a) + 2 : used] = 1
        filled = np.full(self.length, padding, np.int64)
        filled[:used] = ids
        return {
            "input_ids": torch.from_numpy(filled),
            "token_type_ids": torch.from_numpy(kinds),
            "attention_mask": (torch.arange(self.length) < used).long(),
            "next_sentence_label": torch.tensor(label),
        }


def _shortened(
    a: np.ndarray, b: np.ndarray, most: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Both parts with at most so many tokens together, each of which is taken from the front or the
    back of the longer part."""
    while len(a) + len(b) > most:
        front = int(generator.random() < 0.5)
        if len(a) > len(b):
            a = a[front : len(a) - 1 + front]
        else:
            b = b[front : len(b) - 1 + front]
    return a, b
