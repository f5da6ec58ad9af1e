"""A plan as plain text: what was assumed, what was decided, what it takes, and why.

80 to 110 columns, no colour, every number with its unit, nothing that depends on the machine that
prints it, so that a report can be compared as text.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from graphaccel.capture.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.messages import columns, format_bytes
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.estimate import (
    held_parameters,
    message_bytes,
    predict_memory,
    timeline,
)
from graphaccel.planner.plan import Plan, Prediction, StageMemory
from graphaccel.planner.profile import Parameter, Profile
from graphaccel.planner.stages import stage_positions
from graphaccel.schedule.text import LEGEND, gantt

_BAR = 32
_GANTT = 72
_WIDTH = 110
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def plan_report(
    plan: Plan, step: StepGraph, cluster: Cluster, *, model_name: str, assumed: str
) -> str:
    """The whole report, with a newline at its end.

    plan: with a prediction. assumed: what was taken for granted, e.g. "AdamW; memory not probed".
    Raises: ValueError for a plan without a prediction.
    """
    prediction = plan.prediction
    if prediction is None:
        raise ValueError("this plan was not predicted yet")
    profile = Profile(step)
    sections = [
        _head(plan, step, cluster, profile, model_name, assumed),
        _decisions(plan, profile, cluster),
        _memory(plan, prediction, cluster),
        _time(plan, prediction, profile, cluster),
        _why(plan, prediction, profile, cluster),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head(
    plan: Plan,
    step: StepGraph,
    cluster: Cluster,
    profile: Profile,
    model_name: str,
    assumed: str,
) -> list[str]:
    numbers = _count(profile.parameters, step)
    tokens = f" x {step.sizes[SEQUENCE]} tokens" if SEQUENCE in step.sizes else ""
    ops = Counter(n.meta.get("phase") for n in step.graph.graph.nodes if n.op == "call_function")
    kinds = len({block.kind for block in step.blocks})
    blocks = f", {len(step.blocks)} blocks of {_plural(kinds, 'kind')}" if step.blocks else ""
    link = ", ".join(f"{x.name} {x.bandwidth / 1e9:.3g} GB/s" for x in cluster.links)
    memory = format_bytes(cluster.device.memory)
    lines = [
        f"model   {model_name}   {numbers:,} parameters in {_tensors(profile.parameters)}, "
        f"batch {plan.batch}{tokens}",
        f"cluster {plan.devices} x {cluster.device.name}, {memory} each"
        + (f", {link}" if cluster.count > 1 else ""),
        f"capture {sum(ops.values()):,} ops (forward {ops['forward']:,}, "
        f"backward {ops['backward']:,}){blocks}",
    ]
    return [*lines, f"assumed {assumed}"] if assumed else lines


def _count(parameters: Sequence[Parameter], step: StepGraph) -> int:
    """Trained and frozen numbers, shared ones once."""
    known = {p.name for p in parameters}
    sizes = {}
    nodes = step.graph.graph.find_nodes(op="placeholder")
    for node, spec in zip(nodes, step.inputs, strict=True):
        name = step.tied.get(spec.name, spec.name)
        if spec.kind == "parameter" and name in known:
            sizes[name] = node.meta["val"].numel()
    return sum(sizes.values())


def _decisions(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    lines = [f"PLAN    {plan.name}"]
    if plan.pinned:
        lines += _wrapped(f"pinned: {', '.join(plan.pinned)}")
    parts = _plural(plan.microbatches, "microbatch")
    lines.append(f"  batch {plan.batch} = data {plan.data} x {parts} of {plan.microbatch_size}")
    if plan.data > 1:
        lines.append(
            f"  gradients summed over data {plan.data} in buckets of "
            f"{format_bytes(plan.bucket_bytes)}"
        )
    if plan.stages > 1:
        lines.append(f"  schedule {plan.schedule}, {plan.stages} stages")
    spans = stage_positions(profile, plan.cuts)
    rows = []
    for stage, span in enumerate(spans):
        held = held_parameters(profile, [span])
        size = sum(p.bytes for p in held)
        rows.append(
            (
                f"  stage {stage}" if plan.stages > 1 else "  all",
                f"rank {stage % plan.pipeline}" if plan.stages > 1 else "every device",
                _tensors(held),
                format_bytes(size),
                fold([p.name for p in held]),
            )
        )
    lines += [_clipped(line) for line in columns(rows)]
    sized = profile.sized(plan.microbatch_size, cluster.device, plan.precision.compute)
    sent = message_bytes(profile, sized, plan)
    for stage, name in enumerate(plan.cuts):
        module = profile.modules[profile.position[name]] or "the model's own code"
        crossing = sum(
            size for (a, b, way), size in sent.items() if way == "forward" and a <= stage < b
        )
        lines.append(
            f"  cut {stage}|{stage + 1} after {name} ({module}), "
            f"{format_bytes(crossing)} per microbatch each way"
        )
    if plan.recompute:
        lines.append(_clipped(f"  recompute {fold(plan.recompute, parameters=False)}"))
    return lines


def fold(names: Sequence[str], *, parameters: bool = True) -> str:
    """Names in short: parameters by block or module, consecutive blocks as `h.0-3`."""
    groups: dict[str, None] = {}
    for name in names:
        module = name.rpartition(".")[0] or name
        groups[block_of(name) or (module if parameters else name)] = None
    folded: list[str] = []
    last: tuple[str, int] | None = None
    for group in groups:
        stem, _, number = group.rpartition(".")
        if number.isdigit():
            if last == (stem, int(number) - 1):
                start = folded[-1].removeprefix(f"{stem}.").split("-")[0]
                folded[-1] = f"{stem}.{start}-{number}"
            else:
                folded.append(group)
            last = (stem, int(number))
        else:
            folded.append(group)
            last = None
    return ", ".join(folded)


def _memory(plan: Plan, prediction: Prediction, cluster: Cluster) -> list[str]:
    memory = prediction.memory
    if not memory:
        return ["MEMORY  not predicted"]
    unit, size = _unit(max(m.tensors for m in memory))
    total = cluster.device.memory
    names = ("param", "grad", "optstate", "activ", "temp", "other", "peak")
    rows: list[tuple[str, ...]] = [(f"MEMORY  {unit} per device", *names, f"of {_in(total, size)}")]
    for m in memory:
        devices = f"rank {m.rank} ({_plural(plan.data, 'device')})"
        rows.append((f"  {devices}", *(_in(n, size) for n in _parts(m)), _bar(m, total)))
    lines = _right(rows)
    top = max(memory, key=lambda m: (m.peak, -m.rank))
    context = format_bytes(cluster.context_bytes)
    lines.append(_clipped(f"  peak at: rank {top.rank}, {top.at}"))
    lines.append(f"  other = context {context}, {cluster.fragmentation:.0%} fragmentation")
    free = total - top.peak
    verdict = "fits" if free >= 0 else "does not fit"
    lines.append(f"  {verdict}: {format_bytes(abs(free))} {'free' if free >= 0 else 'too much'}")
    return lines


def _parts(m: StageMemory) -> tuple[int, ...]:
    return (m.parameter, m.gradient, m.optimizer, m.activation, m.temporary, m.other, m.peak)


def _bar(m: StageMemory, total: int) -> str:
    """`[PPGGOOOOAAAAT······]`: the device's memory, one letter per category."""
    bar, used = "", 0
    for letter, size in zip("PGOATX", _parts(m)[:-1], strict=True):
        used += size
        bar += letter * (round(min(used, total) / total * _BAR) - len(bar))
    return f"[{bar.ljust(_BAR, '·')}]"


def _time(plan: Plan, prediction: Prediction, profile: Profile, cluster: Cluster) -> list[str]:
    p = prediction
    share = p.bubble / p.seconds if p.seconds else 0.0
    lines = [
        f"TIME    {seconds_text(p.seconds)} per step (predicted from a roofline, not measured)",
        f"  compute {seconds_text(p.compute)} · exposed communication "
        f"{seconds_text(p.communication)} · bubble {seconds_text(p.bubble)} ({share:.1%}) · "
        f"optimizer {seconds_text(p.optimizer)}",
    ]
    if plan.pipeline > 1:
        schedule, played = timeline(profile, plan, cluster)
        lines += [f"  {row}" for row in gantt(schedule, played.spans, _GANTT).splitlines()]
        lines.append(f"  {LEGEND}")
    return lines


def _why(plan: Plan, prediction: Prediction, profile: Profile, cluster: Cluster) -> list[str]:
    lines = ["WHY"]
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
        if any(len(line) > _WIDTH for line in columns(rows)):  # names are long: reasons below them
            rows = [
                part
                for head, *row, why in rows
                for part in ((head, *row), ("", f"  {why}", "", ""))
            ]
        lines += columns(rows)
    else:
        lines.append("  no other way to use these devices was possible or allowed")
    terms = {
        "compute": prediction.compute,
        "communication": prediction.communication,
        "the pipeline's bubble": prediction.bubble,
        "the optimizer": prediction.optimizer,
    }
    lines.append(f"  most of the time goes to {max(terms, key=lambda name: terms[name])}")
    if plan.recompute and prediction.memory:
        lines.append(_recompute_price(plan, prediction, profile, cluster))
    for note in (*plan.notes, plan.certificate):
        lines += _wrapped(note)
    return lines


def _recompute_price(plan: Plan, prediction: Prediction, profile: Profile, cluster: Cluster) -> str:
    """What recomputation costs, and the memory from which it would not be needed."""
    sized = profile.sized(plan.microbatch_size, cluster.device, plan.precision.compute)
    chosen = set(plan.recompute)
    again = sum(
        seconds
        for name, seconds in zip(profile.block_names, sized.block_seconds(), strict=True)
        if name in chosen
    )
    share = again * plan.microbatches / plan.pipeline / prediction.seconds
    spans = stage_positions(profile, plan.cuts)[:: plan.pipeline]  # of rank 0
    trained = sum(p.bytes for p in held_parameters(profile, spans) if p.trainable)
    state = round(4 * prediction.memory[0].optimizer / trained) if trained else 0
    kept = predict_memory(profile, plan.decided(recompute=()), cluster, state)
    blocks = _plural(len(plan.recompute), "block")
    enough = max(k.peak for k in kept)
    price = f"  recomputing {blocks} costs about {share:.0%} of the step"
    if enough <= cluster.device.memory:
        return f"{price}; memory does not need it"
    return f"{price}; from {format_bytes(enough)} per device it would not be needed"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: `412 ms`, `1.25 s`, `31.0 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            value = seconds / scale
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit always matches")


def _unit(size: int) -> tuple[str, int]:
    return next((name, unit) for name, unit in _UNITS if size >= unit / 10 or unit == 1)


def _in(size: int, unit: int) -> str:
    return f"{size / unit:,.1f}"


def _plural(count: int, name: str) -> str:
    if count == 1:
        return f"1 {name}"
    return f"{count:,} {name}{'es' if name.endswith('ch') else 's'}"


def _tensors(parameters: Sequence[Parameter]) -> str:
    return _plural(len(parameters), "tensor")


def _right(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with the first column left-aligned, numbers right-aligned, the last column as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines


def _wrapped(line: str) -> list[str]:
    """Indented, on as many lines as it needs."""
    return textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _clipped(line: str, width: int = _WIDTH) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
