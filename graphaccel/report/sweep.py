"""The table of plans for several numbers of devices, batch sizes, sequence lengths, or pins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import jinja2

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.report.format import clipped, right_aligned, seconds_text
from graphaccel.report.throughput import number_text, throughput_of

_HOUR = 3600.0
_MILLION = 1e6


@dataclass(frozen=True)
class SweepRow:
    """The plan of one size: a number, or pins as text. seconds: of a step. rate: tokens (or
    examples, see `SweepTable.unit`) a second on all devices together. utilisation: model FLOPs
    utilisation, 0 to 1. peak: bytes on the fullest device. cost: of a million tokens; None without
    a price. Where no plan exists, `reason` says why, and the other fields are empty."""

    size: int | str
    devices: int = 0
    plan: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    utilisation: float = 0.0
    peak: int = 0
    verdict: str = ""
    cost: float | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        """The size for people."""
        return self.size if isinstance(self.size, str) else f"{self.size:,}"

    @property
    def rate_of_device(self) -> float:
        return self.rate / self.devices if self.devices else 0.0


@dataclass(frozen=True)
class SweepTable:
    """axis: what differs between the rows. unit: "tokens" or "examples". price: of one device for
    an hour, in any currency; None where it was not given."""

    model: str
    device: str
    axis: str
    unit: str
    price: float | None
    rows: tuple[SweepRow, ...]

    def to_json(self) -> str:
        """All figures, with a newline at the end."""
        return json.dumps(asdict(self), indent=1) + "\n"


def sweep_row(
    size: int | str, plan: Plan, step: StepGraph, cluster: Cluster, price: float | None
) -> SweepRow:
    """The row of a plan with a prediction. step: before it is sharded. price: of one device for an
    hour, or None."""
    assert plan.prediction is not None
    seconds = plan.prediction.seconds
    count = plan.batch * step.sizes.get(SEQUENCE, 1)
    top = max(plan.prediction.memory, key=lambda m: m.peak)
    bill = None if price is None else price * plan.devices * seconds / _HOUR
    return SweepRow(
        size=size,
        devices=plan.devices,
        plan=plan_name(plan),
        seconds=seconds,
        rate=count / seconds if seconds else 0.0,
        utilisation=throughput_of(step, plan, cluster).utilisation(seconds, plan.devices),
        peak=top.peak,
        verdict=cluster.verdict(top.tensors),
        cost=None if bill is None else bill / count * _MILLION,
    )


def unit_of(step: StepGraph) -> str:
    """What a step's throughput is counted in."""
    return "tokens" if SEQUENCE in step.sizes else "examples"


def sweep_text(table: SweepTable) -> str:
    """The table for a terminal, a line a size, with a newline at the end."""
    cost = [] if table.price is None else [f"cost of 1 M {table.unit}"]
    head = [table.axis, "step", f"{table.unit}/s", "a device", "MFU", "memory", *cost, "  plan"]
    rows = [head, *(_cells(row, table) for row in table.rows)]
    title = f"SWEEP   {table.model} on {table.device}, by {table.axis}"
    if table.price is not None:
        title += f"; a device costs {table.price:g} an hour"
    return "\n".join(clipped(line) for line in (title, "", *right_aligned(rows))) + "\n"


def _cells(row: SweepRow, table: SweepTable) -> list[str]:
    cost = [] if table.price is None else ["" if row.cost is None else f"{row.cost:.3g}"]
    if row.reason:
        return [row.name, "-", "", "", "", "", *cost, f"  {row.reason}"]
    return [
        row.name, seconds_text(row.seconds), number_text(row.rate),
        number_text(row.rate_of_device), f"{row.utilisation:.1%}", format_bytes(row.peak),
        *cost, f"  {row.plan}{'' if row.verdict == 'safe' else f' ({row.verdict})'}",
    ]  # fmt: skip


def sweep_html(table: SweepTable) -> str:
    """One self-contained page: the table, and the throughput of a device and the step as bars."""
    source = files("graphaccel.report").joinpath("sweep.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    filters: dict[str, Any] = {
        "seconds": seconds_text, "number": number_text, "bytes": format_bytes
    }  # fmt: skip
    environment.filters.update(filters)
    return environment.from_string(source).render(
        table=table,
        fastest=max((row.rate_of_device for row in table.rows), default=0.0) or 1.0,
        longest=max((row.seconds for row in table.rows), default=0.0) or 1.0,
    )
