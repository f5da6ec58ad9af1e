"""Compares two plans: decisions that differ, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphaccel.errors.messages import format_bytes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import fold
from graphaccel.report.format import CATEGORIES, clipped, right_aligned, seconds_text, term_name

_SIZES = {"bucket_bytes"}
_LONGEST = 34


def comparison(a: Plan, b: Plan, *, names: tuple[str, str]) -> str:
    """The differences as text, with a newline at its end. names: of the plans."""
    sections = [
        [f"A  {names[0]}: {plan_name(a)}", f"B  {names[1]}: {plan_name(b)}"],
        _different_inputs(a, b),
        _decisions(a, b),
        _memory(a, b),
        _time(a, b),
    ]
    lines = ("\n".join(clipped(line) for line in section) for section in sections if section)
    return "\n\n".join(lines) + "\n"


def _different_inputs(a: Plan, b: Plan) -> list[str]:
    """Models, clusters and batches of the plans where they are not the same: then times cannot be
    compared. Graph fingerprints are of a model and a batch: with different batches they do not
    identify the model."""
    both = (
        *([("model", a.graph, b.graph)] if a.batch == b.batch else []),
        ("cluster", a.cluster, b.cluster),
        ("devices", a.devices, b.devices),
        ("global batch", a.batch, b.batch),
    )
    rows = [(f"  {name}", str(x), str(y), "") for name, x, y in both if x != y]
    if not rows:
        return []
    return ["MADE FOR something else", *right_aligned([("", "A", "B", ""), *rows])]


def _decisions(a: Plan, b: Plan) -> list[str]:
    left, right = a.decisions, b.decisions
    rows = [
        (f"  {name}", described(name, left.get(name)), described(name, right.get(name)), "")
        for name in dict.fromkeys((*left, *right))
        if left.get(name) != right.get(name)
    ]
    if not rows:
        return ["DECISIONS  all the same"]
    return ["DECISIONS that differ", *right_aligned([("", "A", "B", ""), *rows])]


def described(name: str, value: Any) -> str:
    """A decision's value in short."""
    if name in _SIZES and isinstance(value, int):
        return format_bytes(value)
    if name == "axis_placements":
        kinds = (f"{len(own)} kinds of blocks on {axis}" for axis, own in value)
        return ", ".join(kinds) or "none"
    if name == "selective":
        value = tuple(block for own in value for block in own.blocks)
    if isinstance(value, tuple):
        blocks = name in ("recompute", "selective")
        folded = fold(value, parameters=False) if blocks else ", ".join(map(str, value))
        return (
            folded if 0 < len(folded) <= _LONGEST else f"{len(value)} places" if value else "none"
        )
    if hasattr(value, "compute"):
        scaled = ", scaled" if value.scaled else ""
        return f"{value.compute}{scaled}"
    return str(value)


def _memory(a: Plan, b: Plan) -> list[str]:
    if a.prediction is None or b.prediction is None:
        return []
    stages = a.prediction.memory, b.prediction.memory
    if not all(stages):
        return []
    tops = [max(memory, key=lambda m: m.peak) for memory in stages]
    rows: list[Sequence[str]] = [("MEMORY  fullest rank", "A", "B", "B - A")]
    left, right = ({**top.parts, "peak": top.peak} for top in tops)
    if tops[0].host or tops[1].host:
        left["on the host"], right["on the host"] = tops[0].host, tops[1].host
    for name in dict.fromkeys((*left, *right)):
        x, y = left.get(name, 0), right.get(name, 0)
        more = f"{'+' if y >= x else '−'}{format_bytes(abs(y - x))}"
        label = CATEGORIES.get(name, (name,))[0]
        rows.append((f"  {label}", format_bytes(x), format_bytes(y), more))
    return right_aligned(rows)


def _time(a: Plan, b: Plan) -> list[str]:
    if a.prediction is None or b.prediction is None:
        return []
    rows: list[Sequence[str]] = [("TIME    per step", "A", "B", "B - A")]
    left = {**a.prediction.terms, "step": a.prediction.seconds}
    right = {**b.prediction.terms, "step": b.prediction.seconds}
    for name in dict.fromkeys((*left, *right)):
        x, y = left.get(name, 0.0), right.get(name, 0.0)
        share = f" ({y / x - 1:+.1%})" if name == "step" and x else ""
        more = f"{'+' if y >= x else '−'}{seconds_text(abs(y - x))}{share}"
        rows.append((f"  {term_name(name)}", seconds_text(x), seconds_text(y), more))
    return right_aligned(rows)
