"""Which sizes of a batch may vary, and at which others a step is captured as well.

Besides the number of examples it is the length of the integer matrices. Where they have two, as
those of an encoder and a decoder, each has a symbol of its own, once both have been seen to vary:
that takes three captures more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

import sympy

from graphaccel.capture.batch import (
    LONG,
    Batch,
    batch_size,
    sequence_lengths,
    sequence_matrices,
)
from graphaccel.capture.symbols import BATCH, SEQUENCE, SEQUENCES

_LEAST = 4
"""Shorter sequences are fixed: half of them could be one, which models treat differently."""

Dims = Mapping[int, int]


@dataclass(frozen=True)
class Point:
    """Another capture. size: of the symbol in the first one; other: in this one. places: dims of
    the leaves that have it; the first that the model takes."""

    symbol: sympy.Symbol
    size: int
    other: int
    places: tuple[Dims, ...]


def points(batch: Batch, batch_dims: Dims, most: int) -> list[Point]:
    """The captures that tell how the sizes of a step depend on those of its batch. most: how many
    lengths may vary."""
    size, lengths = batch_size(batch, batch_dims), sequence_lengths(batch, batch_dims)
    symbols = {1: (SEQUENCE,), 2: SEQUENCES}.get(len(lengths), ()) if len(lengths) <= most else ()
    more = next(n for n in count(size + 2, 2) if n not in lengths)
    results = [Point(BATCH, size, more, (batch_dims,))]
    for symbol, (length, integers) in zip(symbols, lengths.items(), strict=False):
        if length < _LEAST:
            continue
        matrices = sequence_matrices(batch, batch_dims, length, integers)
        places = (matrices,) if matrices == integers else (matrices, integers)
        half = length // 2
        taken = half in lengths or half == size >= LONG
        results.append(Point(symbol, length, length // 4 if taken else half, places))
    return results
