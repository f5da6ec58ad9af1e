"""The bytes of `PREFIX.idx`: Megatron-LM's index of a file of tokens, version 1.

    magic      9 bytes   b"MMIDIDX\\0\\0"
    version    uint64    1
    dtype      uint8     a code of `DTYPES`
    sequences  uint64    count
    documents  uint64    count of the last array
    lengths    int32     tokens of each sequence
    pointers   int64     byte at which each sequence begins in PREFIX.bin
    documents  int64     first sequence of each document, then the count of sequences

All numbers are little-endian. Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphaccel.errors import BadData

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"),
    5: np.dtype("<i8"), 6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2"),
}  # fmt: skip


@dataclass(frozen=True)
class Index:
    """lengths: [sequences], int32; pointers: [sequences], int64, bytes; documents: int64, first
    sequence of each document, then the count of sequences."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    def write(self, path: Path) -> None:
        """Write the file."""
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        head = _HEAD.pack(MAGIC, 1, code, len(self.lengths), len(self.documents))
        with path.open("wb") as file:
            file.write(head)
            file.write(self.lengths.astype("<i4").tobytes())
            file.write(self.pointers.astype("<i8").tobytes())
            file.write(self.documents.astype("<i8").tobytes())


def read_index(path: Path, content: int) -> Index:
    """The index at `path`, memory-mapped. content: bytes of the file of tokens.

    Raises BadData (GA417) for a file that is no index, is cut off, or points past the tokens.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise _bad(path, "it does not begin as an index of Megatron-LM does")
    _, version, code, sequences, documents = _HEAD.unpack(head)
    if version != 1 or code not in DTYPES:
        raise _bad(path, f"version {version} with dtype code {code} is not known")
    if DTYPES[code].kind == "f":
        raise _bad(path, f"its tokens are {DTYPES[code].name}, no whole numbers")
    expected = _HEAD.size + 12 * sequences + 8 * documents
    if size < expected:  # indices of several modalities have one more array
        raise _bad(path, f"it has {size} bytes, and {sequences} sequences take {expected}")
    ends = np.cumsum([_HEAD.size, 4 * sequences, 8 * sequences])
    arrays = [
        np.memmap(path, dtype, "r", int(start), (count,)) if count else np.empty(0, dtype)
        for dtype, start, count in zip(
            ("<i4", "<i8", "<i8"), ends, (sequences, sequences, documents), strict=True
        )
    ]
    index = Index(DTYPES[code], *arrays)
    _check(path, index, content)
    return index


def _check(path: Path, index: Index, content: int) -> None:
    lengths, pointers, documents = index.lengths, index.pointers, index.documents
    if len(lengths) and (lengths.min() < 0 or pointers.min() < 0):
        raise _bad(path, "a length or a place is negative")
    count, width = int(lengths.sum(dtype=np.int64)), index.dtype.itemsize
    if count and content in [count * other for other in (1, 2, 4, 8) if other != width]:
        each = content // count
        reason = f"its {count} tokens have {each} bytes each, and the index beside it says "
        raise _bad(path.with_suffix(".bin"), reason + index.dtype.name)
    ends = pointers + lengths.astype(np.int64) * index.dtype.itemsize
    if len(ends) and (last := int(ends.max())) > content:
        tokens = path.with_suffix(".bin")
        raise _bad(tokens, f"it has {content} bytes, and the index beside it needs {last}")
    ordered = len(documents) == 0 or bool(np.all(np.diff(documents) >= 0))
    if not ordered or len(documents) < 1 or int(documents[-1]) != len(lengths):
        raise _bad(path, "its documents do not end with its last sequence")
    if int(documents[0]) != 0:
        raise _bad(path, "its documents do not begin with its first sequence")


def _bad(path: Path, reason: str) -> BadData:
    return BadData(
        place=str(path),
        reason=reason,
        help_line="write both files again:  graphaccel tokenize text.jsonl --tokenizer "
        f"tokenizer.json --output {path.with_suffix('')}",
    )
