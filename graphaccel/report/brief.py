"""The report on one screen: what was decided, whether it fits, how fast it is, and why."""

from __future__ import annotations

from collections.abc import Sequence

from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import Alternative
from graphaccel.report.certainty import error_text
from graphaccel.report.explanation import answer_lines
from graphaccel.report.facts import Facts, fold
from graphaccel.report.format import WIDTH, clipped, plural, seconds_text, wrapped
from graphaccel.report.ort import ort_lines
from graphaccel.report.text import (
    head_lines,
    host_lines,
    memory_rows,
    owner_of,
    summed,
    terms_text,
    time_line,
    verdict_line,
)
from graphaccel.report.throughput import rate_line

SCREEN = 40
"""Lines of the report, without answers to `--why-not`."""
_ALTERNATIVES, _TRAFFIC, _NOTES = 3, 3, 4


def brief_text(facts: Facts) -> str:
    """The report of `facts` in at most `SCREEN` lines, then the answers that were asked for."""
    sections = [
        head_lines(facts, capture=False), _decisions(facts), _memory(facts), _time(facts),
        _why(facts),
    ]  # fmt: skip
    lines = "\n\n".join("\n".join(each) for each in sections).split("\n")
    if len(lines) >= SCREEN:
        lines = [*lines[: SCREEN - 2], "  ..."]
    lines.append("  stages, schedule, every rank and every reason: --explain")
    text = ["\n".join(lines)]
    text += ["\n".join(answer_lines(one, facts.plan, facts.cluster)) for one in facts.answers]
    return "\n\n".join(text) + "\n"


def _decisions(facts: Facts) -> list[str]:
    plan = facts.plan
    lines = [f"PLAN    {plan_name(plan)}"]
    if plan.pinned:
        lines.append(clipped(f"  pinned: {', '.join(plan.pinned)}"))
    parts = plural(plan.microbatches, "microbatch")
    lines.append(f"  batch {plan.batch} = data {plan.data} x {parts} of {plan.microbatch_size}")
    if plan.data > 1:
        lines.append(clipped(f"  {summed(plan)}"))
    if plan.stages > 1:
        held = [stage.holds for stage in facts.stages]
        lines.append(
            clipped(f"  {plan.stages} stages, {plan.schedule}: {held[0]} | ... | {held[-1]}")
        )
    if plan.recompute:
        lines.append(clipped(f"  recompute {fold(plan.recompute, parameters=False)}"))
    if plan.selective:
        blocks = [name for own in plan.selective for name in own.blocks]
        lines.append(clipped(f"  recompute in part {fold(blocks, parameters=False)}"))
    return lines + [clipped(line) for line in ort_lines(plan)[:1]]


def _memory(facts: Facts) -> list[str]:
    memory = facts.prediction.memory
    if not memory:
        return ["MEMORY  not predicted"]
    top = max(memory, key=lambda m: (m.peak, -m.rank))
    header, *rows = memory_rows(facts)
    lines = [header, rows[memory.index(top)], clipped(f"  peak at: rank {top.rank}, {top.at}")]
    return [*lines, *host_lines(facts)[:2], verdict_line(facts, top)]


def _time(facts: Facts) -> list[str]:
    lines = [time_line(facts)]
    if facts.throughput is not None:
        said = rate_line(facts.plan, facts.throughput, facts.model.tokens, facts.prediction.seconds)
        lines += wrapped(said)
    lines += wrapped(terms_text(facts))
    if facts.calibration is not None:
        lines.append(clipped(f"  {error_text(facts.calibration)}"))
    longest = sorted(facts.traffic, key=lambda t: -t.seconds)[:_TRAFFIC]
    sent = [f"{t.kind} over {t.axis} {seconds_text(t.seconds)}" for t in longest]
    return lines + ([clipped(f"  sent, hidden or not: {' · '.join(sent)}")] if sent else [])


def _why(facts: Facts) -> list[str]:
    plan, lines = facts.plan, ["WHY"]
    others = _of_kinds(plan.alternatives)
    if not others:
        lines.append("  no other way to use these devices was possible or allowed")
    head = "  next best:  "
    reasons = [f"  {seconds_text(other.seconds):>7}  {other.reason}" for other in others]
    room = max(24, WIDTH - len(head) - max(map(len, reasons), default=0))
    width = min(room, max((len(other.name) for other in others), default=0))
    for other, reason in zip(others, reasons, strict=True):
        name = clipped(other.name, width)
        lines.append(clipped(f"{head}{name:<{width}}{reason}"))
        head = " " * len(head)
    terms = facts.prediction.terms
    lines.append(f"  most of the time goes to {owner_of(max(terms, key=lambda name: terms[name]))}")
    for note in (*plan.notes[:_NOTES], plan.certificate):
        lines += wrapped(note)[:2]
    return lines


def _of_kinds(alternatives: Sequence[Alternative]) -> list[Alternative]:
    """The first few that use the devices in different ways, in their order: of plans whose axes
    have the same names, whatever their sizes, one."""
    kinds: dict[tuple[str, ...], Alternative] = {}
    for other in alternatives:
        mesh = other.name.split(" · ")[0].split(",")[0]
        axes = [each.split() for each in mesh.split(" x ")]
        large = tuple(name for name, *size in axes if size and size[0] != "1")
        kinds.setdefault(large, other)
    return list(kinds.values())[:_ALTERNATIVES]
