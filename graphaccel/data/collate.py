"""Collators of examples of many lengths: padded to few lengths, or packed into rows of one length.

An example is a sequence of tokens, or a mapping with `input_ids` and optionally `labels` of as many
numbers. Labels are not shifted: models shift them themselves. -100 is ignored by the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphaccel.errors import BadData

IGNORED = -100
"""The label that adds nothing to a cross entropy."""


@dataclass(frozen=True)
class PaddingCollator:
    """Pads the examples of a batch on the right, to the least of `lengths` that holds all of them.

    Each length of a batch is a program; with few lengths there are few. A batch has `input_ids`,
    `attention_mask` (1 at tokens, 0 at padding) and `labels` (-100 at padding), each int64
    [examples, length]. labels default to `input_ids`. padding: the token that fills a row.

    Raises BadData (GA417) for an example longer than the largest of `lengths`.
    """

    lengths: Sequence[int]
    padding: int = 0

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        pairs = [_pair(example) for example in examples]
        longest = max(len(ids) for ids, _ in pairs)
        fitting = [length for length in self.lengths if length >= longest]
        if not fitting:
            raise BadData(
                place="a batch",
                reason=f"an example has {longest} tokens, and the longest padded length is "
                f"{max(self.lengths)}",
                help_line=f"PaddingCollator(lengths={[*sorted(self.lengths), longest]})",
            )
        ids = torch.full((len(pairs), min(fitting)), self.padding)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for row, (own, marks) in enumerate(pairs):
            ids[row, : len(own)], labels[row, : len(own)] = own, marks
            mask[row, : len(own)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@dataclass(frozen=True)
class PackingCollator:
    """Packs the examples of a batch into `rows` rows of `length` tokens, the longest ones first,
    each into the first row with room.

    A batch has, int64 [rows, length], `input_ids`; `labels`, -100 at padding and at the first token
    of each example; `position_ids`, which begin at 0 in each example. masked: also
    `attention_mask`, bool [rows, 1, length, length], in which no example sees another, and, if
    `causal`, no token a later one. Rows that no example needs are padding alone, so that all
    batches have one shape.

    Raises BadData (GA417) where the examples do not fit.
    """

    length: int
    rows: int
    masked: bool = True
    causal: bool = True
    padding: int = 0

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        shape = self.rows, self.length
        ids, labels = torch.full(shape, self.padding), torch.full(shape, IGNORED)
        positions, document = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        for row, begin, number, (own, marks) in self._placed(examples):
            where = row, slice(begin, begin + len(own))
            ids[where], labels[where], document[where] = own, marks, number
            labels[row, begin] = IGNORED
            positions[where] = torch.arange(len(own))
        results = {"input_ids": ids, "labels": labels, "position_ids": positions}
        if self.masked:
            seen = document[:, :, None] == document[:, None]
            results["attention_mask"] = (seen.tril() if self.causal else seen)[:, None]
        return results

    def _placed(self, examples: Sequence[Any]) -> list[tuple[int, int, int, tuple[Tensor, Tensor]]]:
        """Row and first place of each example, its number, and its tokens and labels."""
        pairs = [_pair(example) for example in examples]
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))
        used = [0] * self.rows
        results = []
        for number in order:
            size = len(pairs[number][0])
            row = next((r for r, n in enumerate(used) if n + size <= self.length), None)
            if row is None:
                total = sum(len(ids) for ids, _ in pairs)
                raise BadData(
                    place="a batch",
                    reason=f"{len(pairs)} examples of {total} tokens do not fit into {self.rows} "
                    f"rows of {self.length}",
                    help_line=f"PackingCollator(length={max(self.length, size)}, "
                    f"rows={len(pairs)})",
                )
            results.append((row, used[row], number, pairs[number]))
            used[row] += size
        return results


def _pair(example: Any) -> tuple[Tensor, Tensor]:
    """Tokens and labels of an example: int64 [n] each."""
    if not isinstance(example, Mapping):
        example = {"input_ids": example}
    ids = torch.as_tensor(example["input_ids"], dtype=torch.int64)
    labels = torch.as_tensor(example.get("labels", ids), dtype=torch.int64)
    if ids.dim() != 1 or len(ids) == 0 or labels.shape != ids.shape:
        raise BadData(
            place="an example",
            reason=f"`input_ids` has shape {list(ids.shape)} and `labels` {list(labels.shape)}: "
            "both are sequences of as many numbers, at least one",
            help_line='{"input_ids": [5, 3, 8], "labels": [5, 3, 8]}',
        )
    return ids, labels
