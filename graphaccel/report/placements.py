"""Shows the placements of a plan's tensors: by mesh axis, and on it by kind of block."""

from __future__ import annotations

from collections.abc import Iterator

from graphaccel.errors.messages import columns
from graphaccel.planner.plan.axis_placements import BlockPlacements, Texts
from graphaccel.planner.plan.plan import Plan
from graphaccel.report.format import clipped, plural

_NAMES = 60
"""Characters of names on a line; the plan's JSON has all of them."""


def placement_lines(plan: Plan) -> list[str]:
    """The placement of parameters and the strategies of calls, those that are the same on one line;
    no lines for a plan that shards no tensor over an axis of its own."""
    if not plan.axis_placements:
        return []
    lines = ["PLACEMENTS  what each rank of an axis holds and computes, by kind of block"]
    for axis, kinds in plan.axis_placements:
        lines.append(f"  {axis} {plan.ranks(axis)}")
        for kind in kinds:
            lines += _kind(kind)
    return lines


def _kind(kind: BlockPlacements) -> Iterator[str]:
    count = len(kind.names)
    name = ", ".join(name for name in kind.blocks if name)
    yield clipped(f"    {name} ({plural(count, 'block')})" if name else "    outside of blocks")
    rows = []
    for section in ("parameters", "forward", "backward"):
        for text, names in _by_text(getattr(kind, section)).items():
            rows.append((f"      {section}", text, _listed(names)))
            section = ""
    yield from map(clipped, columns(rows) if rows else ())


def _by_text(texts: Texts) -> dict[str, list[str]]:
    """Text → what is placed so, the most frequent text first."""
    results: dict[str, list[str]] = {}
    for name, text in texts:
        results.setdefault(text, []).append(name)
    return dict(sorted(results.items(), key=lambda item: -len(item[1])))


def _listed(names: list[str]) -> str:
    """As many names as fit on a line, and how many there are more."""
    shown: list[str] = []
    for name in names:
        if shown and len(", ".join([*shown, name])) > _NAMES:
            break
        shown.append(name)
    left = len(names) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")
