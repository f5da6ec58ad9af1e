"""Reads and writes sequences of tokens, in Megatron-LM's pair of files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice, repeat
from pathlib import Path
from types import TracebackType

import numpy as np

from graphaccel.data.layout import Index, read_index
from graphaccel.errors import BadData


class TokenFile:
    """Sequences of tokens in `PREFIX.bin`, indexed by `PREFIX.idx`. Nothing is read before it is
    asked for.

    Raises BadData (GA417) for a file that is missing, cut off or of another format.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(str(prefix).removesuffix(".bin").removesuffix(".idx"))
        tokens, index = (_beside(self.prefix, end) for end in (".bin", ".idx"))
        for path in (tokens, index):
            if not path.is_file():
                raise BadData(
                    place=str(path),
                    reason="there is no such file",
                    help_line=f"write it:  graphaccel tokenize text.jsonl --tokenizer "
                    f"tokenizer.json --output {self.prefix}",
                )
        size = tokens.stat().st_size
        self._index = read_index(index, size)
        self._bytes = np.memmap(tokens, np.uint8, "r") if size else np.empty(0, np.uint8)

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return self._index.dtype

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence: [sequences], int32."""
        return self._index.lengths

    @property
    def documents(self) -> np.ndarray:
        """First sequence of each document, then the count of sequences: int64."""
        return self._index.documents

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._index.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The tokens of a sequence: [length], a view of the file."""
        length = int(self._index.lengths[sequence])
        start = int(self._index.pointers[sequence])
        return self._bytes[start : start + length * self.dtype.itemsize].view(self.dtype)


class TokenWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`; both get their names when it is closed, so that a
    run that ends before leaves neither. Use it in a `with` statement.

    dtype: of the tokens; `dtype_for` chooses it by the size of a vocabulary.

    Raises BadData (GA417) where the files can not be written, here and in every method.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type = np.uint16) -> None:
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self._lengths: list[int] = []
        self._documents = [0]
        self._end = f".{os.getpid()}.partial"  # ranks may write the same file, each a whole one
        self._partial = _beside(self.prefix, ".bin" + self._end)
        with _written(self.prefix):
            self._file = self._partial.open("wb")

    def add(self, *sequences: Sequence[int] | np.ndarray) -> None:
        """Add a document of one or more sequences.

        Raises BadData (GA417) for a token that the dtype does not hold.
        """
        for tokens in sequences:
            self._write(tokens)
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def add_many(
        self, tokens: np.ndarray, lengths: Iterable[int], sequences: Iterable[int] | None = None
    ) -> None:
        """Add documents whose tokens stand one after the other.

        lengths: of each sequence. sequences: of each document; one each by default.

        Raises BadData (GA417) for a token that the dtype does not hold, and where lengths or
        sequences do not sum to what is there.
        """
        each = list(lengths)
        added = list(repeat(1, len(each)) if sequences is None else sequences)
        self._check_sum("lengths", each, len(tokens), "tokens")
        self._check_sum("sequences", added, len(each), "sequences")
        self._write(tokens)
        before = len(self._lengths)
        self._lengths.extend(each)
        self._documents.extend(islice(accumulate(added, initial=before), 1, None))

    def _check_sum(self, name: str, parts: Sequence[int], count: int, unit: str) -> None:
        if sum(parts) != count or min(parts, default=0) < 0:
            raise BadData(
                place=str(self.prefix),
                reason=f"{name} sum to {sum(parts)}, and {count} {unit} are added",
                help_line="writer.add(document) for each document",
            )

    def _write(self, tokens: Sequence[int] | np.ndarray) -> None:
        content = as_tokens(tokens, self.dtype, self.prefix).tobytes()
        with _written(self.prefix):
            self._file.write(content)

    def close(self) -> None:
        """Write the index, and give both files their names."""
        with _written(self.prefix):
            self._close()

    def _close(self) -> None:
        self._file.close()
        lengths = np.asarray(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        index = _beside(self.prefix, ".idx" + self._end)
        Index(self.dtype, lengths, pointers, np.asarray(self._documents)).write(index)
        self._partial.replace(_beside(self.prefix, ".bin"))
        index.replace(_beside(self.prefix, ".idx"))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(OSError):  # of a full disk, which is being said
                self._file.close()
            self._partial.unlink()


def dtype_for(vocabulary: int) -> np.dtype:
    """As Megatron-LM chooses: uint16 for a vocabulary below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocabulary < 65_500 else np.dtype("<i4")


def as_tokens(tokens: Sequence[int] | np.ndarray, dtype: np.dtype, where: Path) -> np.ndarray:
    """The tokens in `dtype`. Raises BadData (GA417) for one that it does not hold."""
    given = np.asarray(tokens)
    if given.size and given.dtype.kind not in "iu":
        raise BadData(
            place=str(where),
            reason=f"tokens of {given.dtype.name} are no whole numbers",
            help_line="writer.add([5, 3, 8])",
        )
    if given.size and given.dtype != dtype:
        bounds = np.iinfo(dtype)
        if given.min() < bounds.min or given.max() > bounds.max:
            raise BadData(
                place=str(where),
                reason=f"token {int(given.max())} does not fit in {dtype.name}",
                help_line="TokenWriter(prefix, dtype_for(vocabulary))",
            )
    return given.astype(dtype, copy=False)


@contextmanager
def _written(prefix: Path) -> Iterator[None]:
    """Around writing. Raises BadData (GA417) where it fails, e.g. on a full disk."""
    try:
        yield
    except OSError as error:
        raise BadData(
            place=str(_beside(prefix, ".bin")),
            reason=f"it can not be written: {error.strerror or error}",
            help_line=f"mkdir -p {prefix.parent}"
            if isinstance(error, FileNotFoundError)
            else "make room, or name a folder elsewhere",
        ) from None


def _beside(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)
