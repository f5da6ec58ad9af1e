"""Formats numbers, lists and tables for reports."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence

from graphaccel.planner.search.reasons import TERMS

WIDTH = 110
_LINES, _FIRST, _LAST = 20, 8, 4  # of many similar lines, those shown
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
CATEGORIES = {
    "parameter": ("param", "P"),
    "gradient": ("grad", "G"),
    "optimizer": ("optstate", "O"),
    "activation": ("activ", "A"),
    "temporary": ("temp", "T"),
    "other": ("other", "X"),
}
"""The column name of a memory category, and its letter in a bar."""


def term_name(name: str) -> str:
    """The name of a term of the step's time."""
    return TERMS.get(name, name.replace("_", " "))


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: `412 ms`, `1.25 s`, `31.0 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            value = seconds / scale
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit always matches")


def unit_of(size: int) -> tuple[str, int]:
    return next((name, unit) for name, unit in _UNITS if size >= unit / 10 or unit == 1)


def in_unit(size: int, unit: int) -> str:
    return f"{size / unit:,.1f}"


def plural(count: int, name: str) -> str:
    if count == 1:
        return f"1 {name}"
    return f"{count:,} {name}{'es' if name.endswith('ch') else 's'}"


def right_aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with the first column left-aligned, numbers right-aligned, the last column as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines


def wrapped(line: str) -> list[str]:
    """Indented, wrapped to as many lines as needed."""
    return textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def clipped(line: str, width: int = WIDTH) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"


def folded(modules: Sequence[str]) -> str:
    """`layers.*.mlp x 4, norm`: numbers folded, so that repeated layers are one entry."""
    counts = Counter(".".join("*" if p.isdigit() else p for p in m.split(".")) for m in modules)
    return ", ".join(f"{m} x {n}" if n > 1 else m for m, n in counts.items())


def shortened(lines: Sequence[str], keep: Collection[int] = ()) -> list[str]:
    """Of many similar lines the first and last, and those to `keep` (by number): the data
    (`--format json`) has all of them."""
    if len(lines) <= _LINES:
        return list(lines)
    shown = sorted({*range(_FIRST), *range(len(lines) - _LAST, len(lines)), *keep})
    results: list[str] = []
    for before, number in zip([-1, *shown], shown, strict=False):
        if number > before + 2:
            results.append(f"  ... {number - before - 1} more")
        elif number == before + 2:
            results.append(lines[number - 1])
        results.append(lines[number])
    return results
