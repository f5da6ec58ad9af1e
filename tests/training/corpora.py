"""Small real data that every machine with Python has: its help, its sources and its bytecode."""

from __future__ import annotations

import importlib.util
import json
import keyword
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np

_MODULES = ("argparse", "ast", "inspect", "pathlib", "subprocess", "typing")


def write_lines(file: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def help_texts(file: Path) -> Path:
    """Python's help, a document a topic."""
    return write_lines(file, [{"text": text} for text in topics.topics.values()])


def words_of_either_case(file: Path) -> Path:
    """Python's keywords and names of topics, in capital or small letters, and which."""
    rows = [{"text": word.upper(), "label": "capital"} for word in _words()]
    return write_lines(file, rows + [{"text": word, "label": "small"} for word in _words()])


def words_in_capitals(file: Path) -> Path:
    """Python's keywords and names of topics, and the same in capital letters."""
    return write_lines(file, [{"source": word, "target": word.upper()} for word in _words()])


def pictures_of_bytes(file: Path) -> Path:
    """[16, 16] pictures whose pixels are bytes: of source texts, and of bytecode."""
    sources = [np.frombuffer(_source(name).encode(), np.uint8) for name in _MODULES]
    codes = [np.frombuffer(_bytecode(name), np.uint8) for name in _MODULES]
    kinds = [np.concatenate(kind)[: 256 * 200].reshape(-1, 16, 16) for kind in (sources, codes)]
    labels = np.repeat(["source", "bytecode"], [len(kind) for kind in kinds])
    np.savez(file, images=np.concatenate(kinds), labels=labels)
    return file


def _words() -> list[str]:
    return sorted({word.lower() for word in (*keyword.kwlist, *topics.topics) if word.isalpha()})


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _bytecode(name: str) -> bytes:
    import marshal

    return marshal.dumps(compile(_source(name), name, "exec"))
