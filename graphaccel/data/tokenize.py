"""Turns files of JSON lines into a file of tokens, with several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from graphaccel.data.json_lines import bad_line, check_file, object_of, text_of
from graphaccel.data.sentences import sentences_of
from graphaccel.data.token_file import TokenWriter, dtype_for
from graphaccel.errors import BadData
from graphaccel.progress import progress

_CHUNK = 1 << 20
"""Bytes of lines that a process gets at once."""


@dataclass(frozen=True)
class Written:
    """What was written. skipped: lines that are no JSON object with a text."""

    documents: int
    tokens: int
    skipped: int


@dataclass(frozen=True)
class _Chunk:
    path: str
    line: int  # number of the first
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class _Tokens:
    tokens: np.ndarray
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]  # of each document
    bad: tuple[tuple[int, str], ...]  # number of the line, reason


@dataclass(frozen=True)
class _Encoder:
    """Turns the lines of a chunk into tokens. file: of the tokenizer; end: token of documents;
    split: a sequence for each sentence."""

    file: str
    key: str
    end: int | None
    split: bool

    def __call__(self, chunk: _Chunk) -> tuple[_Chunk, _Tokens]:
        texts, bad = [], []
        for number, line in enumerate(chunk.lines, chunk.line):
            if not line.strip():
                continue
            try:
                texts.append(text_of(object_of(line), self.key))
            except ValueError as error:
                bad.append((number, str(error)))
        parts = [sentences_of(text) if self.split else [text] for text in texts]
        sequences = tuple(map(len, parts))
        flat_texts = list(itertools.chain.from_iterable(parts))
        rows = [row.ids for row in _tokenizer(self.file).encode_batch_fast(flat_texts)]
        if self.end is not None:
            for last in itertools.accumulate(sequences):
                rows[last - 1] = [*rows[last - 1], self.end]
        lengths = tuple(map(len, rows))
        flat = np.fromiter(itertools.chain.from_iterable(rows), np.int64, sum(lengths))
        return replace(chunk, lines=()), _Tokens(flat, lengths, sequences, tuple(bad))


@lru_cache(maxsize=1)
def _tokenizer(file: str) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(file)
    except Exception as error:  # the library has no class of its own
        raise BadData(
            place=file,
            reason=f"it is no tokenizer of the `tokenizers` library: {error}",
            help_line='tokenizer.save("tokenizer.json")',
        ) from None


def tokenize(
    paths: Iterable[str | Path],
    tokenizer: str | Path,
    prefix: str | Path,
    *,
    key: str = "text",
    end: str | None = None,
    workers: int = 1,
    skip_bad_lines: bool = False,
    split_sentences: bool = False,
) -> Written:
    """Write the tokens of JSON lines to `PREFIX.bin` and `PREFIX.idx`, a document a line, in order.

    tokenizer: a `tokenizer.json` of the `tokenizers` library, or a folder with one.
    key: of the text in each line's object.
    end: a token, e.g. "<|endoftext|>", to put behind each document.
    workers: processes that tokenize; 1 does it in this one.
    skip_bad_lines: go on after a line that is no JSON object with a text, and count it.
    split_sentences: a sequence for each sentence of a document, for `SentencePairs`.

    Raises BadData (GA417), with file and line number, for such a line, for a tokenizer that is not
    there, and for an end token that it does not have.
    """
    started = time.perf_counter()
    file = _tokenizer_file(Path(tokenizer))
    encoder = _Encoder(str(file), key, _end_token(file, end), split_sentences)
    count = Written(0, 0, 0)
    with (
        TokenWriter(prefix, dtype_for(_tokenizer(str(file)).get_vocab_size())) as writer,
        _workers(workers) as each,
    ):
        for chunk, result in each(encoder, _chunks(map(Path, paths))):
            if result.bad and not skip_bad_lines:
                raise bad_line(chunk.path, *result.bad[0])
            writer.add_many(result.tokens, result.lengths, result.sequences)
            count = Written(
                count.documents + len(result.sequences),
                count.tokens + len(result.tokens),
                count.skipped + len(result.bad),
            )
    text = f"{count.documents:,} documents, {count.tokens:,} tokens, {count.skipped} skipped"
    progress("tokenize", text, time.perf_counter() - started)
    return count


@contextmanager
def _workers(count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` that runs in `count` processes, in order."""
    if count == 1:
        yield map
        return
    kept = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core, and no threads in it
    try:
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            yield pool.imap
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        os.environ.update({} if kept is None else {"TOKENIZERS_PARALLELISM": kept})


def _chunks(paths: Iterable[Path]) -> Iterator[_Chunk]:
    for path in paths:
        check_file(path)
        with path.open("rb") as file:
            number = 1
            while lines := tuple(file.readlines(_CHUNK)):
                yield _Chunk(str(path), number, lines)
                number += len(lines)


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise BadData(
            place=str(file),
            reason="there is no such tokenizer",
            help_line='transformers.AutoTokenizer.from_pretrained("gpt2").save_pretrained("folder")',
        )
    return file


def _end_token(file: Path, end: str | None) -> int | None:
    number = None if end is None else _tokenizer(str(file)).token_to_id(end)
    if end is not None and number is None:
        raise BadData(
            place=str(file),
            reason=f"it has no token {end!r}",
            help_line="leave the end token out, or add it:  tokenizer.add_special_tokens"
            f"([{end!r}])",
        )
    return number
