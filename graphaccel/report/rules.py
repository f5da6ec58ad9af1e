"""Lists the sharding rule of every op of a captured step, and the cost of ops without one.

    priced_rules(step, device) -> RuleRow, ...  -> rules_text(rows, ...)

An op without a rule runs unsharded on every device of an axis, so its whole time stays; and where
the batch is split it is refused (GA301), as it could mix examples.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import MissingRule
from graphaccel.errors.messages import Location, columns
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.ir.text import target_text, type_text
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.cost import Sizes, node_bytes, node_flops, node_seconds
from graphaccel.report.format import folded, in_unit, plural, seconds_text, unit_of
from graphaccel.report.rule_form import rule_form
from graphaccel.sharding.rules.lowered import has_lowering
from graphaccel.sharding.rules.notation import written
from graphaccel.sharding.rules.table import rule_of


@dataclass(frozen=True)
class RuleRow:
    """Calls of one op under one rule (None: there is none), added up.

    op: `aten.mm`. shape: the output of the most costly of them, as text. modules: their paths,
    layer numbers folded. location: "file:line" of the user's code, "" where unknown. uses: how many
    calls. flops, bytes, seconds: of all of them in one step on one device. share: of the step's
    seconds. form: for an op without a rule, the arguments of a call that gives it one
    (`report.rule_form`).
    """

    op: str
    rule: str | None
    shape: str
    modules: str
    location: str
    uses: int
    flops: int
    bytes: int
    seconds: float
    share: float
    form: str = ""


def priced_rules(step: StepGraph, device: Device) -> tuple[RuleRow, ...]:
    """Every op of forward and backward at the captured sizes, the most costly first."""
    sizes = Sizes(step.sizes)
    calls: dict[tuple[str, str | None], list[tuple[float, fx.Node]]] = {}
    total = 0.0
    for node in step.graph.graph.nodes:
        if not _is_op(node):
            continue
        rule = rule_of(node)
        seconds = node_seconds(node, device, sizes)
        total += seconds
        text = None if rule is None else written(rule)
        if rule is not None and has_lowering(node):
            text = f"{text}   (what is whole or missing: by a rewrite)"
        key = target_text(node.target), text
        calls.setdefault(key, []).append((seconds, node))
    rows = []
    for (op, rule), result in calls.items():
        first = max(result, key=lambda pair: pair[0])[1]
        place = first.meta.get("location")
        seconds = sum(s for s, _ in result)
        rows.append(
            RuleRow(
                op,
                rule,
                type_text(first.meta["val"]),
                folded([n.meta.get("module") or "the model" for _, n in result]),
                str(Location(*place)) if place else "",
                len(result),
                sum(int(node_flops(n, sizes)) for _, n in result),
                sum(int(node_bytes(n, sizes)) for _, n in result),
                seconds,
                seconds / total,
                rule_form(first) if rule is None else "",
            )
        )
    return tuple(sorted(rows, key=lambda r: (-r.seconds, r.op, r.rule or "")))


def every_rule(step: StepGraph) -> bool:
    """Whether every op of a step has a rule."""
    nodes = (node for node, _ in distinct_nodes(step.graph))
    return all(rule_of(node) is not None for node in nodes if _is_op(node))


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def missing(rows: Sequence[RuleRow]) -> MissingRule | None:
    """The error (GA301) that names the ops without a rule, or None if every op has one."""
    without = [r for r in rows if r.rule is None]
    if not without:
        return None
    rows_described = tuple((r.op, r.shape, r.modules, r.location, r.uses) for r in without)
    return MissingRule(ops=rows_described, form=without[0].form)


def missing_note(rows: Sequence[RuleRow]) -> tuple[str, ...]:
    """A report line: the cost of ops without a rule, which run unsharded on every device."""
    without = [r for r in rows if r.rule is None]
    if not without:
        return ()
    share = 100 * sum(r.share for r in without)
    names = ", ".join(r.op for r in without)
    return (f"no sharding rule, whole on every device: {names} ({share:.1f} % of a step's ops)",)


def rules_text(rows: Sequence[RuleRow], model: str, device: Device) -> str:
    """The rows as text: those without a rule first, with how to add one."""
    without = [r for r in rows if r.rule is None]
    ops = len({r.op for r in rows})
    lines = [
        f"{plural(ops, 'op')} in a step of {model}, prices of one {device.name} device; "
        + (f"{len(without)} without a sharding rule" if without else "every op has a sharding rule")
    ]
    if without:
        head = ("op", "uses", "GFLOP", "bytes", "time", "of step", "shape", "module", "line")
        cells = [(r.op, *_price(r), r.shape, r.modules, r.location or "-") for r in without]
        lines += ["", "WITHOUT A RULE: whole on every device, and no split of the batch"]
        lines += [f"  {line}" for line in columns([head, *cells])]
        lines += ["", "say how the first may be split; it is proved by running it on the example:"]
        lines += [f"  graphaccel.sharding_rule({without[0].form})"]
    head = ("op", "uses", "GFLOP", "bytes", "time", "of step", "rule")
    cells = [(r.op, *_price(r), r.rule) for r in rows if r.rule is not None]
    lines += ["", "WITH A RULE: dims of one name are split together; a name that is missing on the"]
    lines += ["right is summed over, _ is a dim that is not split, 1 one that is repeated"]
    lines += [f"  {line}" for line in columns([head, *cells])]
    return "\n".join(lines) + "\n"


def _price(row: RuleRow) -> tuple[str, ...]:
    unit, size = unit_of(row.bytes)
    return (
        str(row.uses),
        f"{row.flops / 1e9:,.3g}",
        f"{in_unit(row.bytes, size)} {unit}",
        seconds_text(row.seconds),
        f"{100 * row.share:.1f} %",
    )
