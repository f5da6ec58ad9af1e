"""Renders the report as one self-contained HTML page, with its styles and pictures inside."""

from __future__ import annotations

from importlib.resources import files

import jinja2

from graphaccel.errors.messages import format_bytes
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report import charts
from graphaccel.report.certainty import error_text
from graphaccel.report.explanation import stability
from graphaccel.report.facts import Facts
from graphaccel.report.format import CATEGORIES, plural, seconds_text, term_name
from graphaccel.report.phases import misfits, phase_rows
from graphaccel.report.text import facts_text

_NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer state",
    "activation": "activations",
    "temporary": "temporary",
}


def html_page(facts: Facts) -> str:
    """The whole page."""
    source = files("graphaccel.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["seconds"] = seconds_text
    environment.filters["bytes"] = format_bytes
    environment.filters["term"] = term_name
    environment.filters["error_text"] = error_text
    environment.filters["phase_rows"] = phase_rows
    environment.filters["misfits"] = misfits
    memory, memory_note = charts.memory_charts(facts)
    kinds = {area.kind for chart in memory for area in chart.areas}
    why = facts.explanation
    return environment.from_string(source).render(
        facts=facts,
        plan=facts.plan,
        plan_name=plan_name(facts.plan),
        cluster=facts.cluster,
        prediction=facts.prediction,
        top=max(facts.prediction.memory, key=lambda m: (m.peak, -m.rank)),
        cards=_cards(facts),
        width=charts.WIDTH,
        memory=memory,
        memory_note=memory_note,
        legend=[(kind, _NAMES.get(kind, kind)) for kind in CATEGORIES if kind in kinds],
        gantt=charts.gantt_chart(facts),
        apart=any(event.kind == "weight" for event in facts.events),
        waterfall=charts.waterfall_chart(facts),
        pareto=charts.pareto_chart(facts),
        why=why,
        stability=stability(why) if why is not None else "",
        phases=max(facts.prediction.memory, key=lambda m: (m.peak, -m.rank), default=None),
        text=facts_text(facts),
        plural=plural,
    )


def _cards(facts: Facts) -> list[tuple[str, str, str]]:
    """(what, value, detail) of the large cards on top."""
    seconds, memory = facts.prediction.seconds, facts.cluster.device.memory
    peak = max(m.peak for m in facts.prediction.memory)
    examples = facts.plan.batch / seconds if seconds else 0.0
    tokens = facts.model.tokens
    rate = (
        f"{examples * tokens:,.0f} tokens/s"
        if tokens is not None
        else f"{examples:,.1f} examples/s"
    )
    free = memory - peak
    verdict = f"{format_bytes(abs(free))} {'free' if free >= 0 else 'too much'}"
    if facts.room is not None:
        verdict += f" · {facts.room.verdict}: {facts.room.reason}"
    cards = [
        ("step, predicted", seconds_text(seconds), rate),
        ("peak per device", format_bytes(peak), f"of {format_bytes(memory)}: {verdict}"),
        (
            "devices",
            f"{facts.plan.devices}",
            f"{facts.cluster.device.name} · {_mesh(facts)}",
        ),
        (
            "model",
            _short(facts.model.parameters),
            f"parameters · batch {facts.plan.batch}" + (f" x {tokens} tokens" if tokens else ""),
        ),
    ]
    if facts.measured is not None:
        off = facts.measured.seconds / seconds - 1
        beside = f"{off:+.1%} · median of {plural(facts.measured.steps, 'step')}"
        cards.insert(1, ("step, measured", seconds_text(facts.measured.seconds), beside))
    return cards


def _mesh(facts: Facts) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in facts.plan.mesh.items())


def _short(count: int) -> str:
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)
