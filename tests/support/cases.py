"""Which cases of parametrized tests a quick run takes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping
from math import prod
from typing import Any
from zlib import crc32

WHOLE = ("cli", "docs", "errors", "support")
"""Folders of which every case is cheap, or checks a text of its own."""
HEAVY = (
    "capture",
    "compiler",
    "dispatch",
    "examples",
    "gloo",
    "guards",
    "integrations",
    "kernels",
    "ort",
    "passes",
    "planner",
    "report",
    "runtime",
    "sharding",
    "training",
)
"""Folders whose cases take seconds each."""

Cases = Mapping[str, Mapping[str, Hashable]]
"""Test ids in the order of collection → the parameters of each: name → value."""

_FEW = 2
"""Processes that two cores run at once."""
_LARGE = {"bart", "gpt_oss", "jetmoe", "mixtral", "resnet", "swin", "t5"}
"""Models of the zoo whose processes count five times."""
_MANY = 4
"""The weight of cases that no quick run takes from HEAVY where the test has lighter ones: a
large model, or more than four processes."""
_AXES = ("data", "tensor", "pipeline", "context", "expert")


def weight_of(parameters: Mapping[str, Any], tables: Mapping[str, Any]) -> int:
    """How many processes a case needs: that of its plan, `(processes, pins)`, of its pins, or of
    axes that are named with their sizes; five times as many for a large model.

    tables: names of the test's module; a parameter may be a key of one of its mappings.
    """
    named = [value for name, value in tables.items() if name.isupper() and isinstance(value, dict)]
    values = list(parameters.values())
    values += [table[v] for v in values if isinstance(v, str) for table in named if v in table]
    large = any(isinstance(value, str) and value in _LARGE for value in values)
    return max(map(_processes, values), default=1) * (1 + 4 * large)


def _processes(value: object) -> int:
    if isinstance(value, str):  # as in "tensor2-data2"
        return prod(int(n) for n in re.findall(rf"(?:{'|'.join(_AXES)})(\d)", value))
    if isinstance(value, Mapping):
        return prod(n for axis in _AXES if type(n := value.get(axis)) is int)
    if isinstance(value, tuple):
        counts = [v for v in value if type(v) is int]
        return max(counts + [_processes(v) for v in value if isinstance(v, Mapping)], default=1)
    return 1


def some_cases(cases: Cases, weights: Mapping[str, int] | None = None) -> set[str]:
    """The ids of the cases of a quick run, the same in every run.

    Every test has at least one case, and at most a third of its cases (at least two), or a
    twelfth (at least one) in HEAVY. Within that number, a case comes first that has parameter
    values which no chosen case of the file has yet, so that tests with the same parameter share its
    values; in HEAVY there are no other cases, and none that weighs more than _MANY where there are
    lighter ones. Of cases with as many new values, those that weigh more than _FEW come last; then
    a checksum of the id decides. weights: `weight_of` by test id.
    """
    weights = weights or {}
    tests: dict[str, list[str]] = defaultdict(list)
    for name in cases:
        tests[name.split("[", 1)[0]].append(name)
    seen: dict[str, set[tuple[str, Hashable]]] = defaultdict(set)
    chosen: set[str] = set()
    for test, names in sorted(tests.items()):
        folder = test.split("/")[1]
        if folder in WHOLE:
            chosen.update(names)
            continue
        heavy = folder in HEAVY
        if heavy:
            names = [n for n in names if weights.get(n, 1) <= _MANY] or names
        limit = max(1, -(-len(names) // 12)) if heavy else max(2, -(-len(names) // 3))
        order = sorted(names, key=lambda n: (weights.get(n, 1) > _FEW, crc32(n.encode()), n))
        chosen |= _covering(
            {name: cases[name] for name in order}, seen[test.split("::", 1)[0]], limit, heavy
        )
    return chosen


def _covering(
    cases: Cases, seen: set[tuple[str, Hashable]], limit: int, only_new: bool
) -> set[str]:
    """At most `limit` cases of one test, of equal ones the first; adds their values to `seen`.
    only_new: after the first, only cases with a value that is not in `seen`."""
    left = list(cases)
    chosen: set[str] = set()
    while left and len(chosen) < limit:
        best = max(left, key=lambda name: len(cases[name].items() - seen))
        if only_new and chosen and not cases[best].items() - seen:
            break
        left.remove(best)
        chosen.add(best)
        seen.update(cases[best].items())
    return chosen
