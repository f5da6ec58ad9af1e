"""Computes the geometry of the pictures in the HTML report; `page.html.jinja` draws them.

All in units of a picture `WIDTH` wide. Each picture notes what it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphaccel.errors.messages import format_bytes
from graphaccel.planner.memory.exact_memory import Sample
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.facts import Event, Facts, Point, RankMemory, StageFacts
from graphaccel.report.format import plural, seconds_text, term_name
from graphaccel.report.scales import Scale, Tick, bytes_label, time_label
from graphaccel.report.trace import event_name
from graphaccel.schedule.table import COMPUTING

WIDTH = 960
_LEFT, _RIGHT = 76, 16
_RANKS = 6  # pictures of memory
_ROWS = 24  # of the schedule
_BARS = 6000
_NUMBERED = 13  # least width of a bar that shows its number


@dataclass(frozen=True)
class Area:
    """One category of a stacked picture; path: of an SVG."""

    kind: str
    path: str


@dataclass(frozen=True)
class MemoryChart:
    """Bytes of tensors on one rank over a step. budget: height of the memory that the device has
    for tensors, None where that is above the top."""

    title: str
    peak: str
    height: float
    left: float
    right: float
    top: float
    bottom: float
    times: tuple[Tick, ...]
    sizes: tuple[Tick, ...]
    areas: tuple[Area, ...]
    budget: float | None
    budget_label: str
    peak_x: float
    peak_y: float


@dataclass(frozen=True)
class Bar:
    """A rectangle with a hover text and, where it fits, a number in it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str
    label: str = ""


@dataclass(frozen=True)
class GanttChart:
    """The schedule: a row for each rank. note: what was left out."""

    height: float
    left: float
    right: float
    bottom: float
    rows: tuple[Tick, ...]
    times: tuple[Tick, ...]
    idle: tuple[Bar, ...]
    bars: tuple[Bar, ...]
    note: str


@dataclass(frozen=True)
class WaterfallRow:
    """One term of the step's time, starting where the previous one ended."""

    name: str
    kind: str
    x: float
    y: float
    width: float
    value: str
    value_x: float
    inside: bool


@dataclass(frozen=True)
class WaterfallChart:
    """The terms that the time of a step consists of."""

    height: float
    left: float
    row: float
    rows: tuple[WaterfallRow, ...]


@dataclass(frozen=True)
class Dot:
    """A candidate in the picture of memory against time."""

    x: float
    y: float
    kind: str
    title: str


@dataclass(frozen=True)
class ParetoChart:
    """Candidates by peak memory (across) and seconds (up). front: the Pareto front, an SVG path."""

    height: float
    left: float
    right: float
    top: float
    bottom: float
    sizes: tuple[Tick, ...]
    times: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    front: str
    budget: float | None
    budget_label: str
    chosen: Dot | None
    chosen_label: str
    chosen_anchor: str
    chosen_drop: float
    note: str


def memory_charts(facts: Facts) -> tuple[tuple[MemoryChart, ...], str]:
    """One for each rank, or for the fullest ones, and a note of what was left out."""
    rows = facts.memory
    note = ""
    if len(rows) > _RANKS:
        full = sorted(rows, key=lambda r: -max(s.total for s in r.samples))[:_RANKS]
        note = f"the {_RANKS} fullest of {len(rows)} pipeline ranks"
        rows = tuple(sorted(full, key=lambda r: r.rank))
    highest = max((s.total - s.live.get("other", 0) for r in rows for s in r.samples), default=0)
    return tuple(_memory_chart(facts, row, highest) for row in rows), note


def _memory_chart(facts: Facts, row: RankMemory, highest: int) -> MemoryChart:
    """highest: bytes of tensors on the fullest rank, so that all pictures have one scale."""
    top, bottom = 12.0, 192.0
    other = row.samples[0].live.get("other", 0)  # fills up the device's memory: not informative
    samples = [
        replace(s, live={kind: size for kind, size in s.live.items() if kind != "other"})
        for s in (*row.samples, replace(row.samples[-1], seconds=facts.prediction.seconds))
    ]
    budget = facts.cluster.device.memory - other
    shown = budget <= 3 * highest
    across = Scale(0, facts.prediction.seconds, _LEFT, WIDTH - _RIGHT)
    label, unit = bytes_label(highest)
    up = Scale(0, max(highest, budget if shown else 0) * 1.06 / unit, bottom, top)
    peak = max(samples, key=lambda s: s.total)
    stages = ", ".join(str(s.stage) for s in facts.stages if s.rank == row.rank)
    return MemoryChart(
        title=f"rank {row.rank} · stage {stages}",
        peak=f"peak {format_bytes(peak.total + other)} at {seconds_text(peak.seconds)}: {peak.at}",
        height=bottom + 26,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=top,
        bottom=bottom,
        times=across.ticks(8, time_label(facts.prediction.seconds)),
        sizes=up.ticks(4, lambda value: label(value * unit)),
        areas=_areas(samples, across, up, unit),
        budget=up(budget / unit) if shown else None,
        budget_label=f"{format_bytes(budget)} for tensors, {format_bytes(other)} for context and "
        f"fragmentation{'' if shown else ': above this picture'}",
        peak_x=across(peak.seconds),
        peak_y=up(peak.total / unit),
    )


def _areas(samples: Sequence[Sample], across: Scale, up: Scale, unit: float) -> tuple[Area, ...]:
    """Categories that never change at the bottom, those that change most on top."""
    kinds = list(samples[0].live)

    def moves(kind: str) -> int:
        sizes = [s.live[kind] for s in samples]
        return max(sizes) - min(sizes)

    base = [0.0] * len(samples)
    areas = []
    for kind in sorted(kinds, key=lambda k: (moves(k) > 0, kinds.index(k))):
        above = [b + s.live[kind] / unit for b, s in zip(base, samples, strict=True)]
        if above != base:
            there = [f"{across(s.seconds)},{up(y)}" for s, y in zip(samples, above, strict=True)]
            back = [f"{across(s.seconds)},{up(y)}" for s, y in zip(samples, base, strict=True)]
            areas.append(Area(kind, f"M{' L'.join(there)} L{' L'.join(reversed(back))} Z"))
        base = above
    return tuple(areas)


def gantt_chart(facts: Facts) -> GanttChart:
    """The schedule of one replica."""
    row, left, top = 30.0, 118, 8.0
    ranks = sorted({e.rank for e in facts.events})
    shown = ranks[:_ROWS]
    events = [e for e in facts.events if e.rank in shown and e.kind != "send" and e.end > e.start]
    notes = [] if len(shown) == len(ranks) else [f"the first {_ROWS} of {len(ranks)} ranks"]
    if len(events) > _BARS:
        events = sorted(events, key=lambda e: e.start)[:_BARS]
        notes.append(f"the first {_BARS:,} actions")
    across = Scale(0, facts.prediction.seconds, left, WIDTH - _RIGHT)
    bottom = top + row * len(shown)
    bars = [_bar(e, across, top + row * shown.index(e.rank), row) for e in events]
    idle = tuple(
        Bar("idle", left, top + row * i + 3, WIDTH - _RIGHT - left, row - 6, "idle")
        for i in range(len(shown))
    )
    labels = tuple(
        Tick(top + row * (i + 0.5), _row_label(rank, facts.stages)) for i, rank in enumerate(shown)
    )
    return GanttChart(
        height=bottom + 26,
        left=left,
        right=WIDTH - _RIGHT,
        bottom=bottom,
        rows=labels,
        times=across.ticks(8, time_label(facts.prediction.seconds)),
        idle=idle,
        bars=tuple(bars),
        note="; ".join(notes),
    )


def _row_label(rank: int, stages: Sequence[StageFacts]) -> str:
    own = [str(s.stage) for s in stages if s.rank == rank]
    return f"rank {rank} · {'stages' if len(own) > 1 else 'stage'} {','.join(own)}"


def _bar(event: Event, across: Scale, y: float, row: float) -> Bar:
    x, end = across(event.start), across(event.end)
    kind = event.kind
    if kind in COMPUTING and event.microbatch % 2:
        kind += " odd"
    width = max(round(end - x, 1), 0.4)
    number = str(event.microbatch) if event.kind in COMPUTING else ""
    when = f"{seconds_text(event.start)} to {seconds_text(event.end)}"
    return Bar(
        kind,
        x,
        y + 3,
        width,
        row - 6,
        f"{event_name(event)} · stage {event.stage} · {seconds_text(event.end - event.start)} "
        f"({when})",
        number if width >= _NUMBERED else "",
    )


def waterfall_chart(facts: Facts) -> WaterfallChart:
    """The terms of the step one after another, and their sum."""
    left, row = 170.0, 32.0
    prediction = facts.prediction
    longest = max(prediction.seconds, facts.measured.seconds if facts.measured else 0.0)
    across = Scale(0, longest, left, WIDTH - 170)
    rows, done = [], 0.0
    for name, value in prediction.terms.items():
        share = f" · {value / prediction.seconds:.1%}" if prediction.seconds else ""
        rows.append(_fall(term_name(name), name, across, done, value, row * len(rows), share))
        done += value
    rows.append(
        _fall("step, predicted", "step", across, 0, prediction.seconds, row * len(rows), "")
    )
    if facts.measured is not None:
        off = f" · {facts.measured.seconds / prediction.seconds - 1:+.1%}"
        seconds = facts.measured.seconds
        rows.append(_fall("step, measured", "measured", across, 0, seconds, row * len(rows), off))
    return WaterfallChart(row * len(rows) + 6, left, row, tuple(rows))


def _fall(
    name: str, kind: str, across: Scale, start: float, value: float, y: float, share: str
) -> WaterfallRow:
    x = across(start)
    width = max(round(across(start + value) - x, 1), 1.0)
    text = f"{seconds_text(value)}{share}"
    return WaterfallRow(name, kind, x, y, width, text, round(x + width + 8, 1), False)


def pareto_chart(facts: Facts) -> ParetoChart | None:
    """All candidates; None where there are none."""
    points = facts.candidates
    if not points:
        return None
    top, bottom = 14.0, 330.0
    budget = facts.cluster.device.memory
    sizes = [p.peak for p in points]
    shown = budget <= 1.6 * max(sizes)
    label, unit = bytes_label(max(sizes))
    low, high = min(sizes) * 0.96, max(*sizes, budget if shown else 0) * 1.04
    wide = high / low > 20
    across = Scale(low / unit, high / unit, _LEFT, WIDTH - _RIGHT, log=wide)
    times = [p.seconds for p in points]
    fast, slow = min(times) * 0.93, max(times) * 1.05
    up = Scale(fast, slow, bottom, top, log=slow / fast > 6)
    dots = [_dot(p, across(p.peak / unit), up(p.seconds)) for p in points]
    chosen = next((d for d, p in zip(dots, points, strict=True) if p.chosen), None)
    fits = sum(p.fits for p in points)
    return ParetoChart(
        height=bottom + 44,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=top,
        bottom=bottom,
        sizes=across.ticks(7, lambda value: label(value * unit)),
        times=up.ticks(6, time_label(slow)),
        dots=tuple(sorted(dots, key=lambda d: d.kind != "too big")),
        front=_stairs([p for p in points if p.front], across, up, unit),
        budget=across(budget / unit) if shown else None,
        budget_label=f"{format_bytes(budget)} per device",
        chosen=chosen,
        chosen_label=plan_name(facts.plan),
        chosen_anchor="end" if chosen is not None and chosen.x > WIDTH * 0.55 else "start",
        chosen_drop=-12.0 if chosen is not None and chosen.y > bottom - 40 else 22.0,
        note=f"{plural(len(points), 'candidate')}, {fits} of them fit"
        + ("" if shown else f"; the device's {format_bytes(budget)} are to the right of this"),
    )


def _dot(point: Point, x: float, y: float) -> Dot:
    kind = "chosen" if point.chosen else "front" if point.front else "fits"
    if not point.fits:
        kind = "too big"
    title = f"{point.name}\n{seconds_text(point.seconds)} · {format_bytes(point.peak)}"
    return Dot(x, y, kind, title if point.fits else f"{title} · does not fit")


def _stairs(front: Sequence[Point], across: Scale, up: Scale, unit: float) -> str:
    """The Pareto front: for each amount of memory, the least time."""
    ordered = sorted(front, key=lambda p: p.peak)
    if len(ordered) < 2:
        return ""
    first = ordered[0]
    path = f"M{across(first.peak / unit)},{up(first.seconds)}"
    for point in ordered[1:]:
        path += f" H{across(point.peak / unit)} V{up(point.seconds)}"
    return path
