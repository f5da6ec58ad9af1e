"""Which cases of tests with many a quick run takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

WHOLE = ("cli", "docs", "errors", "support")
"""Folders of which every case is cheap, or is about a text of its own."""
_FEWEST = 2


def some_cases(names: Sequence[str]) -> set[str]:
    """Of tests by their ids: a third of the cases of each test, but two at least, the same in
    every run. Chosen by a checksum of the id: every other one would leave out a whole value of the
    innermost parameter."""
    cases: dict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[name.split("[", 1)[0]].append(name)
    chosen: set[str] = set()
    for test, known in cases.items():
        count = len(known)
        if test.split("/")[1] not in WHOLE:
            count = max(_FEWEST, -(-count // 3))
        chosen.update(sorted(known, key=lambda name: (crc32(name.encode()), name))[:count])
    return chosen
