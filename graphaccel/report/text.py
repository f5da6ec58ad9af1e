"""Renders a plan as plain text: assumptions, decisions, memory and time, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors.messages import columns, format_bytes
from graphaccel.ir.program import StepProgram
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.memory.exact_memory import UNEVEN
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.report.certainty import error_text, reserve_of, reserve_text, room
from graphaccel.report.explanation import answer_lines, explanation_lines
from graphaccel.report.facts import Event, Facts, fold, gather
from graphaccel.report.format import (
    CATEGORIES,
    WIDTH,
    clipped,
    in_unit,
    plural,
    right_aligned,
    seconds_text,
    shortened,
    term_name,
    unit_of,
    wrapped,
)
from graphaccel.report.ort import ort_lines
from graphaccel.report.phases import phase_lines
from graphaccel.report.placements import placement_lines
from graphaccel.report.throughput import precision_line, rate_line
from graphaccel.schedule.table import Action, Schedule
from graphaccel.schedule.text import LEGEND, LEGEND_APART, gantt

_BAR = 32
_GANTT = 72
_KEPT = {
    "optimizer": "optimizer state, with the parameters and gradients that it steps",
    "parameters": "all parameters, copied up for each block that reads them",
    "activations": "activations of 1 MiB or more until their backward",
}


def plan_report(
    plan: Plan,
    step: StepGraph,
    cluster: Cluster,
    *,
    model_name: str,
    assumed: str,
    layouts: Layouts | None = None,
    program: StepProgram | None = None,
) -> str:
    """The whole report, with a newline at its end.

    plan: with a prediction. assumed: what was assumed, e.g. "AdamW; memory not probed".
    layouts: profiles of the step and of its shards. program: built for the plan.
    Raises: ValueError for a plan without a prediction, or with axes without a profile.
    """
    facts = gather(
        plan, step, cluster,
        model_name=model_name, assumed=assumed, layouts=layouts, program=program,
    )  # fmt: skip
    return facts_text(facts)


def facts_text(facts: Facts) -> str:
    """The report of `facts` as text, with a newline at its end."""
    sections = [head_lines(facts), _decisions(facts), _memory(facts), _time(facts), _why(facts)]
    if facts.explanation is not None:
        sections.append(placement_lines(facts.plan))
        sections.append(explanation_lines(facts.explanation, facts.plan))
    sections += [answer_lines(answer, facts.plan, facts.cluster) for answer in facts.answers]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def head_lines(facts: Facts, *, capture: bool = True) -> list[str]:
    """The precision, the model, the cluster, what was captured, and what was assumed."""
    model, cluster = facts.model, facts.cluster
    tokens = f" x {model.tokens} tokens" if model.tokens is not None else ""
    kinds = plural(model.block_kinds, "kind")
    blocks = f", {model.blocks} blocks of {kinds}" if model.blocks else ""
    link = ", ".join(f"{x.name} {x.bandwidth / 1e9:.3g} GB/s" for x in cluster.links)
    throughput = facts.throughput
    lines = [precision_line(facts.plan, throughput)] if throughput is not None else []
    lines += [
        f"model   {model.name}   {model.parameters:,} parameters in "
        f"{plural(model.tensors, 'tensor')}, batch {model.batch}{tokens}",
        f"cluster {facts.plan.devices} x {cluster.device.name}, "
        f"{format_bytes(cluster.device.memory)} each" + (f", {link}" if cluster.count > 1 else ""),
    ]
    if capture:
        forward, backward = model.forward_ops, model.backward_ops
        lines.append(
            f"capture {forward + backward:,} ops (forward {forward:,}, backward {backward:,})"
            f"{blocks}"
        )
    return [*lines, f"assumed {facts.assumed}"] if facts.assumed else lines


def _decisions(facts: Facts) -> list[str]:
    plan = facts.plan
    lines = [f"PLAN    {plan_name(plan)}"]
    if plan.pinned:
        lines += wrapped(f"pinned: {', '.join(plan.pinned)}")
    parts = plural(plan.microbatches, "microbatch")
    split = f"data {plan.data}"
    if plan.shard_size:
        split += f" (replicate {plan.num_replicas} x shard {plan.shard_size})"
    lines.append(f"  batch {plan.batch} = {split} x {parts} of {plan.microbatch_size}")
    if plan.reordered:
        lines += wrapped(f"neighbours on an axis: {_apart(plan)}")
    if plan.data > 1:
        lines.append(f"  {summed(plan)}")
    for row in facts.held_parameters:
        lines += wrapped(
            f"over {row.axis} {row.size} rest the {row.what} of {row.tensors:,} of "
            f"{plural(row.of, 'tensor')}: {row.holds}"
        )
    several = plan.stages > 1
    if several:
        lines.append(f"  schedule {plan.schedule}, {plan.stages} stages")
    rows = [
        (
            f"  stage {s.stage}" if several else "  all",
            f"rank {s.rank}" if several else "every device",
            plural(s.tensors, "tensor"),
            format_bytes(s.bytes),
            s.holds,
        )
        for s in facts.stages
    ]
    lines += shortened([clipped(line) for line in columns(rows)])
    cuts = [
        f"  cut {s.stage}|{s.stage + 1} after {s.cut} ({s.cut_module}), "
        f"{format_bytes(s.crossing)} per microbatch each way"
        for s in facts.stages
        if s.cut
    ]
    lines += shortened(cuts)
    if plan.scatter_sends:
        lines.append(
            f"  sent in parts: each of {plan.tensor} tensor ranks sends its own, and all gather"
        )
    if plan.holds_casts:
        lines.append(
            f"  parameters cast to {plan.precision.compute} once a step, and held so for "
            f"{plural(plan.microbatches, 'microbatch')}"
        )
    if plan.recompute:
        lines.append(clipped(f"  recompute {fold(plan.recompute, parameters=False)}"))
    for own in plan.selective:
        blocks = fold(own.blocks, parameters=False)
        lines.append(clipped(f"  recompute {blocks} but for {', '.join(own.saved)}"))
    return lines + [clipped(line) for line in ort_lines(plan)]


def _apart(plan: Plan) -> str:
    """How many devices apart neighbours on an axis are, where the plan has an axis order of its
    own: the outermost axis crosses nodes first."""
    each = [f"{axis} {plan.stride(axis)}" for axis in plan.reordered]
    return f"{', '.join(each)} devices apart"


def summed(plan: Plan) -> str:
    """How gradients are reduced over the data axis."""
    buckets = f"in buckets of {format_bytes(plan.bucket_bytes)}"
    if plan.zero < 2:
        text = f"gradients summed over data {plan.data} {buckets}"
        over = f" over shard {plan.shard_size}" if plan.shard_size else ""
        return f"{text}, parameters gathered{over} after the optimizer" if plan.zero else text
    groups = "a block at a time" if plan.zero == 3 else buckets
    each = plan.microbatches > 1 and plan.accumulation == "shards"
    often = ", in each microbatch" if each else ", once a step" * (plan.microbatches > 1)
    text = f"gradients reduce-scattered over {plan.shard_axis} {plan.shards} {groups}{often}"
    return (
        f"{text}, their shards summed over replicate {plan.num_replicas}"
        if plan.shard_size
        else text
    )


def _memory(facts: Facts) -> list[str]:
    memory, cluster = facts.prediction.memory, facts.cluster
    if not memory:
        return ["MEMORY  not predicted"]
    top = max(memory, key=lambda m: (m.peak, -m.rank))
    lines = shortened(memory_rows(facts), keep=(memory.index(top) + 1,))
    lines += host_lines(facts)
    context = format_bytes(cluster.context_bytes)
    lines.append(clipped(f"  peak at: rank {top.rank}, {top.at}"))
    lines += phase_lines(top, cluster)
    lines.append(f"  other = context {context}, {reserve_text(reserve_of(cluster))}")
    if top.uneven:
        what = f"where {UNEVEN - 1:.0%} more tokens than an even share choose a device's experts"
        then = max(m.tensors + m.uneven for m in memory)
        lines.append(f"  +{format_bytes(top.uneven)} {what}: {room(then, cluster).verdict} then")
    return [*lines, verdict_line(facts, top)]


def memory_rows(facts: Facts) -> list[str]:
    """A header, and the memory of each rank."""
    memory, total = facts.prediction.memory, facts.cluster.device.memory
    unit, size = unit_of(max(m.tensors for m in memory))
    names = [CATEGORIES.get(name, (name,))[0] for name in memory[0].parts]
    measured = dict(enumerate(facts.measured.memory)) if facts.measured else {}
    extra = ("measured",) if measured else ()
    rows = [(f"MEMORY  {unit} per device", *names, "peak", *extra, f"of {in_unit(total, size)}")]
    copies = facts.plan.devices // len(memory)
    for m in memory:
        cells = [in_unit(n, size) for n in (*m.parts.values(), m.peak)]
        if measured:
            cells.append(in_unit(measured[m.rank] + m.other, size))
        rows.append((f"  rank {m.rank} ({plural(copies, 'device')})", *cells, _bar(m, total)))
    return right_aligned(rows)


def verdict_line(facts: Facts, top: StageMemory) -> str:
    """Whether the plan fits, and how surely. top: the fullest rank."""
    free = facts.cluster.device.memory - top.peak
    said = "fits" if free >= 0 else "does not fit"
    said = f"  {said}: {format_bytes(abs(free))} {'free' if free >= 0 else 'too much'}"
    return said if facts.room is None else f"{said}; {facts.room.verdict}: {facts.room.reason}"


def host_lines(facts: Facts) -> list[str]:
    """What each rank holds on its host, where the plan offloads something."""
    host, plan = facts.cluster.host, facts.plan
    if not plan.offload or host is None:
        return []
    measured = facts.measured.host if facts.measured else ()
    rows = []
    for m in facts.prediction.memory:
        ran = f", {format_bytes(measured[m.rank])} measured" if measured else ""
        rows.append(f"rank {m.rank} {format_bytes(m.host)}{ran}")
    of = f"of {format_bytes(host.memory)} for each device"
    shared = ", which has the device's memory too" if host.shared else ""
    what = " and ".join(_KEPT[kind] for kind in plan.offload)
    return wrapped(f"on the host, {of}{shared}: {'; '.join(rows)}: {what}")


def _bar(m: StageMemory, total: int) -> str:
    """`[PPGGOOOOAAAAT······]`: the device's memory, one letter per category."""
    bar, used = "", 0
    for name, size in m.parts.items():
        used += size
        letter = CATEGORIES[name][1] if name in CATEGORIES else name[0].upper()
        bar += letter * (round(min(used, total) / total * _BAR) - len(bar))
    return f"[{bar.ljust(_BAR, '·')}]"


def _time(facts: Facts) -> list[str]:
    lines = [time_line(facts)]
    rates = facts.calibration
    if rates is not None:
        said = wrapped(f"calibration level {rates.level}: {rates.source}")
        lines += [*said, f"  {error_text(rates)}"]
    lines.append(f"  {terms_text(facts)}")
    if facts.throughput is not None:
        seconds = facts.prediction.seconds
        lines += wrapped(rate_line(facts.plan, facts.throughput, facts.model.tokens, seconds))
    if facts.traffic:
        sent = [
            (
                f"    {t.axis}",
                t.kind,
                f"{t.calls:,} x",
                format_bytes(t.bytes),
                seconds_text(t.seconds),
            )
            for t in facts.traffic
        ]
        lines += ["  sent per step by a device, hidden or not:", *columns(sent)]
    measured = facts.measured
    if measured is not None:
        lines.append(
            f"  measured: median of {measured.steps} steps ({seconds_text(measured.fastest)} to "
            f"{seconds_text(measured.slowest)}) on {measured.where}"
        )
    if len(facts.stages) > 1:
        schedule, spans = _as_schedule(facts.events)
        lines += shortened([f"  {row}" for row in gantt(schedule, spans, _GANTT).splitlines()])
        apart = any(a.kind == "weight" for actions in schedule for a in actions)
        lines.append(f"  {LEGEND_APART if apart else LEGEND}")
    return lines


def time_line(facts: Facts) -> str:
    """The predicted seconds of a step, and the measured ones."""
    seconds, measured = facts.prediction.seconds, facts.measured
    if measured is None:
        return f"TIME    {seconds_text(seconds)} per step, predicted"
    return (
        f"TIME    predicted {seconds_text(seconds)} per step / measured "
        f"{seconds_text(measured.seconds)}, {measured.seconds / seconds - 1:+.0%}"
    )


def terms_text(facts: Facts) -> str:
    """The parts of a step's time."""
    p, terms = facts.prediction, []
    for name, value in p.terms.items():
        share = f" ({value / p.seconds if p.seconds else 0:.1%})" if name == "bubble" else ""
        terms.append(f"{term_name(name)} {seconds_text(value)}{share}")
    return " · ".join(terms)


def _as_schedule(events: Sequence[Event]) -> tuple[Schedule, list[list[tuple[float, float]]]]:
    """The events of the schedule, by rank, as an action table and its times."""
    ranks = sorted({e.rank for e in events})
    own = [[e for e in events if e.rank == rank and e.kind != "optimizer"] for rank in ranks]
    table = tuple(
        tuple(Action(e.kind, e.stage, e.microbatch, e.peer, e.direction) for e in row)  # type: ignore[arg-type]
        for row in own
    )
    return table, [[(e.start, e.end) for e in row] for row in own]


def _why(facts: Facts) -> list[str]:
    plan, lines = facts.plan, ["WHY"]
    if plan.alternatives:
        rows: list[tuple[str, ...]] = [
            (
                "  next best:" if i == 0 else "",
                other.name,
                seconds_text(other.seconds),
                format_bytes(other.peak),
                other.reason,
            )
            for i, other in enumerate(plan.alternatives[:4])
        ]
        if any(len(line) > WIDTH for line in columns(rows)):  # long names: reasons on the next line
            rows = [
                part
                for head, *row, why in rows
                for part in ((head, *row), ("", f"  {why}", "", ""))
            ]
        lines += columns(rows)
    else:
        lines.append("  no other way to use these devices was possible or allowed")
    terms = facts.prediction.terms
    lines.append(f"  most of the time goes to {owner_of(max(terms, key=lambda name: terms[name]))}")
    if facts.recompute is not None:
        lines.append(_recompute_price(facts))
    for note in (*plan.notes, plan.certificate):
        lines += wrapped(note)
    return lines


def owner_of(term: str) -> str:
    """What a term of the step's time is spent on, in words."""
    return {"bubble": "the pipeline's bubble", "optimizer": "the optimizer"}.get(
        term, term.replace("_", " ")
    )


def _recompute_price(facts: Facts) -> str:
    price = facts.recompute
    assert price is not None
    text = (
        f"  recomputing {plural(price.blocks, 'block')} costs about {price.share:.0%} of the step"
    )
    if price.enough <= facts.cluster.device.memory:
        return f"{text}; memory does not need it"
    return f"{text}; from {format_bytes(price.enough)} per device it would not be needed"
