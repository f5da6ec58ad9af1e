"""Text to batches: a corpus, a byte-level BPE tokenizer trained on it, memory-mapped tokens.

    data = prepare(corpus=None, vocabulary=4096)          # trains once, then reads the cache
    x, y = data.get_batch("train", batch=16, sequence=128, step=0)

The default corpus is text every machine with Python has: the sources of its standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPLITS = ("train", "validation")
VALIDATION_SHARE = 0.1
FORMAT = "1"  # part of the cache key: raise it when the files below change their meaning
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """The documents of a corpus in a fixed order, and what was left out of it."""

    origin: str
    documents: tuple[str, ...]
    binary: int  # files left out because they are no text
    beyond_cap: int  # files left out because the size cap was reached

    def digest(self, vocabulary: int) -> str:
        """The cache key: 16 hexadecimal digits over contents, vocabulary size and file format."""
        state = hashlib.sha256(f"{FORMAT}:{vocabulary}".encode())
        for document in self.documents:
            content = document.encode()
            state.update(len(content).to_bytes(8, "little") + content)
        return state.hexdigest()[:16]


@dataclass(frozen=True)
class TextData:
    """A tokenizer and the tokens of each split, int64 batches of which are cut at random places."""

    tokenizer: Tokenizer
    tokens: dict[str, np.memmap]  # uint16[n] for each of SPLITS
    summary: str  # one line for people: what was read and how much of it

    @property
    def vocabulary(self) -> int:
        """The number of token ids, which is what the embedding must hold."""
        return self.tokenizer.get_vocab_size()

    def get_batch(
        self, split: str, batch: int, sequence: int, step: int, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and next-token targets, each int64[batch, sequence].

        A pure function of its arguments: every process, and a resumed run, gets the same batch.
        Raises ValueError where the split has fewer than sequence + 1 tokens.
        """
        tokens = self.tokens[split]
        if len(tokens) <= sequence:
            raise ValueError(
                f"{split} has {len(tokens)} tokens, fewer than a sequence of {sequence} and its "
                "last target: give a larger corpus or a shorter sequence"
            )
        generator = np.random.default_rng([seed, SPLITS.index(split), step])
        starts = generator.integers(len(tokens) - sequence, size=batch)
        rows = np.stack([tokens[start : start + sequence + 1] for start in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_corpus(path: Path | None, cap_bytes: int) -> Corpus:
    """The text of a file, of all files in a folder, or (None) of Python's standard library.

    Files come in the order of their path and stop before the one that would pass `cap_bytes`
    (a single file is cut there instead). Raises FileNotFoundError for a path that does not exist
    and ValueError where no text is found.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    if not root.exists():
        raise FileNotFoundError(f"no such corpus: {root}")
    if root.is_file():
        files = [root]
    else:
        files = sorted(_files(root, "*.py" if path is None else "*"), key=lambda f: f.as_posix())
    documents: list[str] = []
    size, binary, beyond_cap = 0, 0, 0
    for position, file in enumerate(files):
        content = file.read_bytes()
        if b"\0" in content[:8192]:
            binary += 1
        elif len(files) > 1 and size + len(content) > cap_bytes:
            beyond_cap = len(files) - position
            break
        elif content:
            content = content[:cap_bytes]
            size += len(content)
            documents.append(content.decode(errors="replace"))
    if not documents:
        raise ValueError(f"no text in {root} (cap {cap_bytes} bytes)")
    origin = "Python's standard library" if path is None else str(path)
    return Corpus(origin, tuple(documents), binary, beyond_cap)


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for file in root.rglob(pattern):
        folders = file.relative_to(root).parts[:-1]
        hidden = any(part.startswith(".") for part in (*folders, file.name))
        if file.is_file() and not hidden and SKIPPED_FOLDERS.isdisjoint(folders):
            yield file


def train_tokenizer(documents: tuple[str, ...], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of `vocabulary` ids (256 bytes, END, merges); fewer for tiny corpora."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def prepare(
    corpus: Path | None = None,
    vocabulary: int = 4096,
    cap_bytes: int = 8_000_000,
    cache: Path | None = None,
) -> TextData:
    """Tokenizer and tokens of a corpus, from the cache where it holds them.

    `cache` defaults to `graphaccel/text` in the user's cache folder. Safe to call from several
    processes at once: each builds in a folder of its own, and the first to rename it wins.
    """
    if not 257 <= vocabulary <= 65536:
        raise ValueError(
            f"vocabulary must be 257 to 65536 (bytes and END; uint16), not {vocabulary}"
        )
    text = read_corpus(corpus, cap_bytes)
    cache = default_cache() if cache is None else cache
    folder = cache / text.digest(vocabulary)
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"tokenizer  training {vocabulary:,} ids on {text.origin} …", flush=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=cache))
        try:
            _build(text, vocabulary, partial)
            _publish(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already where it was renamed
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = {split: np.memmap(folder / f"{split}.bin", np.uint16, mode="r") for split in SPLITS}
    counts = ", ".join(f"{split} {len(tokens[split]):,} tokens" for split in SPLITS)
    summary = f"{text.origin}: {len(text.documents):,} files, {counts}"
    if text.beyond_cap or text.binary:
        cap = f"{text.beyond_cap} files beyond {cap_bytes:,} bytes"
        summary += f" (left out: {cap}, {text.binary} binary files)"
    return TextData(tokenizer, tokens, summary)


def default_cache() -> Path:
    """`graphaccel/text` under XDG_CACHE_HOME, or under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "graphaccel" / "text"


def _build(text: Corpus, vocabulary: int, folder: Path) -> None:
    tokenizer = train_tokenizer(text.documents, vocabulary)
    end = [tokenizer.token_to_id(END)]
    parts: list[np.ndarray] = []
    for first in range(0, len(text.documents), 64):  # encodings are some 50 times their ids
        encodings = tokenizer.encode_batch_fast(list(text.documents[first : first + 64]))
        parts += [np.array(encoding.ids + end, dtype=np.uint16) for encoding in encodings]
    tokens = np.concatenate(parts)
    cut = int(len(tokens) * (1 - VALIDATION_SHARE))
    tokens[:cut].tofile(folder / "train.bin")
    tokens[cut:].tofile(folder / "validation.bin")
    tokenizer.save(str(folder / "tokenizer.json"))


def _publish(partial: Path, folder: Path) -> None:
    """Rename, so that no other process ever sees half a cache."""
    partial.chmod(0o755)  # mkdtemp makes it private
    try:
        partial.rename(folder)
    except OSError:
        # A folder with files can not be renamed onto another: someone else was first.
        if not (folder / "tokenizer.json").exists():
            raise
