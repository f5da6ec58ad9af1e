"""Reads lines of JSON: an object each, in UTF-8, with texts that a tokenizer takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphaccel.errors import BadData

ENDINGS = (".jsonl", ".json", ".ndjson")
"""Of the names of such files."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, without those that are empty.

    Raises BadData (GA417) for a file that is not there, and for one of another kind.
    """
    check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def check_file(path: Path) -> None:
    """Raises BadData (GA417) for a file that is not there, and for one of another kind."""
    if path.is_dir():
        raise BadData(
            place=str(path), reason="it is a folder", help_line=f"its files:  {path}/*.jsonl"
        )
    if not path.is_file():
        raise BadData(place=str(path), reason="there is no such file")
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if compressed:
        raise BadData(place=str(path), reason="it is compressed", help_line=f"gunzip --keep {path}")


def object_of(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises ValueError, saying why there is none."""
    try:
        result = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(result, dict):
        kind = "an array" if isinstance(result, list) else "no object"
        raise ValueError(f"it is {kind}; each line has one object")
    return result


def text_of(example: dict[str, Any], key: str) -> str:
    """A text of an object. Raises ValueError where it is none, or none that UTF-8 can have."""
    if key not in example:
        raise ValueError(f"it has no {key!r}")
    text = example[key]
    if not isinstance(text, str):
        raise ValueError(f"its {key!r} is {json.dumps(text)[:40]}, no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"its {key!r} has {half}, half of a character") from None
    return text


def bad_line(path: str, line: int, reason: str) -> BadData:
    """The error (GA417) for a line of a file that can not be read."""
    return BadData(
        place=f"{path}:{line}",
        reason=reason,
        help_line="mend the line, or count such lines and go on:  --skip-bad-lines",
    )
