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


def prose_or_code(file: Path) -> Path:
    """Lines of Python's help and of its sources, with what they are."""
    prose = [line.strip() for text in topics.topics.values() for line in text.splitlines()]
    code = [line.strip() for name in _MODULES for line in _source(name).splitlines()]
    rows = [{"text": line, "label": "prose"} for line in prose if len(line) > 40][:400]
    rows += [{"text": line, "label": "code"} for line in code if len(line) > 40][:400]
    return write_lines(file, rows)


def words_in_capitals(file: Path) -> Path:
    """Python's keywords and names of topics, and the same in capital letters."""
    words = sorted({word for word in (*keyword.kwlist, *topics.topics) if word.isalpha()})
    return write_lines(file, [{"source": word.lower(), "target": word.upper()} for word in words])


def pictures_of_bytes(file: Path) -> Path:
    """[16, 16] pictures whose pixels are bytes: of source texts, and of bytecode."""
    sources = [np.frombuffer(_source(name).encode(), np.uint8) for name in _MODULES]
    codes = [np.frombuffer(_bytecode(name), np.uint8) for name in _MODULES]
    kinds = [np.concatenate(kind)[: 256 * 200].reshape(-1, 16, 16) for kind in (sources, codes)]
    labels = np.repeat(["source", "bytecode"], [len(kind) for kind in kinds])
    np.savez(file, images=np.concatenate(kinds), labels=labels)
    return file


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def _bytecode(name: str) -> bytes:
    import marshal

    return marshal.dumps(compile(_source(name), name, "exec"))
