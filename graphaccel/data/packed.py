"""Rows of equal length, cut from the documents of a token file that stand one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, Subset

from graphaccel.data.token_file import TokenFile
from graphaccel.errors import BadData


class PackedTokens(Dataset):
    """Row i has tokens i·length to (i + 1)·length of all documents, one after the other.

    A row is a dict of tensors of `length` int64: `input_ids`; `labels`, the same with -100 at the
    first token of each document, as the token before it is of another (models shift labels
    themselves); `position_ids`, which begin at 0 in each document and in each row. masked: also
    `attention_mask`, [1, length, length], bool, in which no document sees another, and, if
    `causal`, no token a later one. What is left over at the end, less than a row, is left out.

    Raises BadData (GA417) where there is no full row.
    """

    def __init__(
        self, tokens: TokenFile, length: int, *, masked: bool = False, causal: bool = True
    ) -> None:
        self.tokens, self.length, self.masked, self.causal = tokens, length, masked, causal
        self._ends = np.cumsum(tokens.lengths, dtype=np.int64)
        first = np.asarray(tokens.documents[:-1])
        starts = np.concatenate([np.zeros(1, np.int64), self._ends])
        self._documents = np.unique(starts[first])  # the token that each document begins with
        total = int(self._ends[-1]) if len(self._ends) else 0
        self._rows = total // length
        if self._rows == 0:
            raise BadData(
                place=str(tokens.prefix),
                reason=f"it has {total} tokens, less than one row of {length}",
                help_line=f"PackedTokens(tokens, length={total}), or --length {total}"
                if total
                else "write it again, of files that have text",
            )

    def __len__(self) -> int:
        """How many rows there are."""
        return self._rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        """The tensors of a row."""
        if not 0 <= row < self._rows:
            raise IndexError(row)
        begin = row * self.length
        ids = torch.from_numpy(self._read(begin, begin + self.length))
        places = np.arange(begin, begin + self.length)
        document = np.searchsorted(self._documents, places, side="right") - 1
        starts = self._documents[document]
        results = {
            "input_ids": ids,
            "labels": ids.masked_fill(torch.from_numpy(places == starts), -100),
            "position_ids": torch.from_numpy(places - np.maximum(starts, begin)),
        }
        if self.masked:
            own = torch.from_numpy(document)
            seen = own[:, None] == own[None]
            results["attention_mask"] = (seen.tril() if self.causal else seen)[None]
        return results

    def split(self, parts: str) -> tuple[Subset, ...]:
        """Rows in parts of these shares, in order: "980,20" are 98 % and 2 %, as in Megatron-LM.

        Raises BadData (GA417) for what are no shares.
        """
        try:
            given = [float(part) for part in parts.split(",")]
        except ValueError:
            given = []
        if not (given and min(given) >= 0 and 0 < sum(given) < float("inf")):
            raise BadData(
                place=str(self.tokens.prefix),
                reason=f"{parts!r} are no shares of its rows",
                help_line='split("980,20")',
            )
        shares = np.cumsum(given)
        ends = np.round(shares / shares[-1] * self._rows).astype(int)
        begins = [0, *ends[:-1]]
        return tuple(Subset(self, range(a, b)) for a, b in zip(begins, ends, strict=True))

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Tokens `begin` to `end` of all sequences, one after the other: int64."""
        parts = []
        sequence = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            stop = int(self._ends[sequence])
            start = stop - int(self.tokens.lengths[sequence])
            parts.append(self.tokens[sequence][begin - start : min(end, stop) - start])
            begin, sequence = min(end, stop), sequence + 1
        return np.concatenate(parts).astype(np.int64)


class ShuffledOrder(Sampler):
    """Rows in a new random order in each epoch, without end, the same on every rank.

    seed: of the order. done: rows that were trained on before, by all ranks; a run that resumes at
    step n gives n times the global batch. rank, ranks, batch: for `optimize(..., batch="local")`,
    where each rank reads its own part: `batch` rows in turn.

    Raises BadData (GA417) where there are no rows, or none for this rank: the order would have no
    first row, and no end.
    """

    def __init__(
        self,
        rows: int,
        *,
        seed: int = 0,
        done: int = 0,
        rank: int = 0,
        ranks: int = 1,
        batch: int = 1,
    ) -> None:
        if rows < 1:
            raise _no_order(f"there are {rows} rows", "ShuffledOrder(len(train))")
        if not 0 <= rank < ranks or batch < 1:
            raise _no_order(
                f"rank {rank} of {ranks}, with {batch} rows a batch, reads none of them",
                "ShuffledOrder(len(train), rank=dist.get_rank(), ranks=dist.get_world_size(), "
                "batch=...)",
            )
        self.rows, self.seed, self.done = rows, seed, done
        self.rank, self.ranks, self.batch = rank, ranks, batch

    def __iter__(self) -> Iterator[int]:
        """Row numbers."""
        for place, row in enumerate(self._of_all_ranks()):
            if place // self.batch % self.ranks == self.rank:
                yield row

    def _of_all_ranks(self) -> Iterator[int]:
        epoch, begin = divmod(self.done, self.rows)
        while True:
            generator = np.random.default_rng((self.seed, epoch))
            yield from generator.permutation(self.rows)[begin:].tolist()
            epoch, begin = epoch + 1, 0


def _no_order(reason: str, help_line: str) -> BadData:
    return BadData(place="ShuffledOrder", reason=reason, help_line=help_line)
