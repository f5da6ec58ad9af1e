"""Explains as text why the planner chose a plan, and why not another."""

from __future__ import annotations

from graphaccel.errors.messages import columns, format_bytes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.explain.answers import Answer, Decision, Explanation
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.certainty import room
from graphaccel.report.format import (
    CATEGORIES,
    clipped,
    right_aligned,
    seconds_text,
    term_name,
    wrapped,
)


def explanation_lines(why: Explanation, plan: Plan) -> list[str]:
    """Decision by decision, then the effect of other numbers or kinds of devices, then the
    certainty."""
    lines = ["DECISIONS  the best plan with each other value, all else planned anew"]
    for decision in why.decisions:
        lines += _decision(decision)
    lines += ["", "WHAT WOULD HELP  the best plan if one thing were different"]
    rows = []
    for price in why.prices:
        if price.gain is None or price.seconds is None:
            rows.append((f"  {price.change}", "nothing fits", "", ""))
            continue
        gain = "no change" if abs(price.gain) < 0.0005 else f"{-price.gain:+.1%}"
        name = "the same plan" if price.name == plan_name(plan) else price.name
        rows.append((f"  {price.change}", gain, seconds_text(price.seconds), name))
    lines += [clipped(line) for line in columns(rows)]
    lines += ["", f"STABILITY  {stability(why)}"]
    for shift in sorted(why.shifts, key=lambda s: -s.regret):
        if shift.regret > 0:
            lines.append(
                clipped(
                    f"  {shift.rate} x {shift.factor:g}: {shift.regret:.1%} slower than "
                    f"{shift.best}"
                )
            )
    return lines


def stability(why: Explanation) -> str:
    """One sentence: in how many perturbed calibrations the plan stays the best."""
    kept = sum(shift.regret <= 0 for shift in why.shifts)
    worst = max((shift.regret for shift in why.shifts), default=0.0)
    text = f"stays the best in {kept} of {len(why.shifts)} calibrations with one rate 10 % off"
    return text if worst == 0 else f"{text}; otherwise at most {worst:.1%} slower"


def _decision(decision: Decision) -> list[str]:
    pinned = " (pinned)" if decision.pinned else ""
    head = f"  {decision.name} {decision.value}{pinned}"
    if not decision.others:
        return [f"{head}: the only value possible"]
    rows = []
    for other in decision.others:
        time = "-" if other.seconds is None else seconds_text(other.seconds)
        peak = "-" if other.peak is None else format_bytes(other.peak)
        rows.append((f"    {other.value}", time, peak, other.reason))
    return [head, *(clipped(line) for line in columns(rows))]


def answer_lines(answer: Answer, plan: Plan, cluster: Cluster) -> list[str]:
    """`--why-not`: the requested plan, its binding limit, and by how much it is worse."""
    known = answer.reason.startswith(answer.verdict) or answer.verdict in ("slower", "faster")
    said = answer.reason if known else f"{answer.verdict}: {answer.reason}"
    lines = [f"WHY NOT  {answer.asked}", *wrapped(said)]
    if answer.seconds is None or answer.peak is None:
        return lines
    rows: list[tuple[str, ...]] = [("", "asked", "chosen", "difference")]
    chosen = plan.prediction
    assert chosen is not None
    rows.append(_versus("  step", answer.seconds, chosen.seconds))
    for name, value in (answer.terms or {}).items():
        rows.append(_versus(f"    {term_name(name)}", value, (answer.theirs or {}).get(name, 0.0)))
    peak = max(m.peak for m in chosen.memory)
    more = answer.peak - peak
    sign = "+" if more >= 0 else "−"
    rows.append(
        (
            "  peak per device",
            format_bytes(answer.peak),
            format_bytes(peak),
            f"{sign}{format_bytes(abs(more))}",
        )
    )
    lines += [f"  best so: {answer.name}", *right_aligned(rows)]
    short = answer.peak - cluster.device.memory
    if short > 0:
        parts = " · ".join(
            f"{CATEGORIES.get(name, (name,))[0]} {format_bytes(size)}"
            for name, size in (answer.breakdown or {}).items()
        )
        lines += wrapped(f"{format_bytes(short)} short on rank {answer.rank}: {parts}")
        had = room(answer.peak - (answer.breakdown or {}).get("other", 0), cluster)
        lines += wrapped(f"{had.verdict} to run all the same: {had.reason}")
    return [clipped(line) for line in lines]


def _versus(name: str, asked: float, chosen: float) -> tuple[str, ...]:
    more = asked - chosen
    sign = "+" if more >= 0 else "−"
    return name, seconds_text(asked), seconds_text(chosen), f"{sign}{seconds_text(abs(more))}"
