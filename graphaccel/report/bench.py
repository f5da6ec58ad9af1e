"""Plans side by side, as they ran: the table and the picture of `graphaccel bench`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any

import jinja2

from graphaccel.errors.messages import format_bytes
from graphaccel.report.format import clipped, right_aligned, seconds_text
from graphaccel.report.throughput import number_text


@dataclass(frozen=True)
class BenchmarkRow:
    """A plan, or plain PyTorch, as it ran. pins: what was asked for. seconds: of each step. memory:
    peak bytes of tensors on the fullest device. Predictions are None for plain PyTorch. Where
    nothing ran, `reason` says why."""

    pins: str
    plan: str = ""
    batch: int = 0
    seconds: tuple[float, ...] = ()
    memory: int = 0
    predicted_seconds: float | None = None
    predicted_memory: int | None = None
    reason: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Samples a second, of the median step."""
        return self.batch / self.median if self.seconds else 0.0

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of samples a second."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles((self.batch / s for s in self.seconds), n=4)
        return (high - low) / 2


@dataclass(frozen=True)
class BenchmarkTable:
    """plain: PyTorch without graphaccel on one device. baseline: the number of the row that others
    are compared with, beside plain; None where it did not run."""

    model: str
    where: str
    steps: int
    plain: BenchmarkRow
    rows: tuple[BenchmarkRow, ...]
    baseline: int | None

    def to_json(self) -> str:
        """All figures, with a newline at the end."""
        derived = [self._derived(row) for row in self.rows]
        said = {"schema": 1, **asdict(self)}
        said["plain"] |= self._derived(self.plain)
        said["rows"] = [row | more for row, more in zip(said["rows"], derived, strict=True)]
        return json.dumps(said, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> BenchmarkTable:
        """The table of `to_json`."""
        said = json.loads(text)
        names = {field.name for field in fields(BenchmarkRow)}

        def row(given: Mapping[str, Any]) -> BenchmarkRow:
            own = {name: value for name, value in given.items() if name in names}
            return BenchmarkRow(**{**own, "seconds": tuple(own["seconds"])})

        rows = tuple(map(row, said["rows"]))
        kept = {name: said[name] for name in ("model", "where", "steps", "baseline")}
        return BenchmarkTable(plain=row(said["plain"]), rows=rows, **kept)

    def _derived(self, row: BenchmarkRow) -> dict[str, float | None]:
        return {
            "samples_per_second": row.rate,
            "spread": row.spread,
            "of_plain": self.of_plain(row),
            "of_baseline": self.of_baseline(row),
        }

    def of_plain(self, row: BenchmarkRow) -> float | None:
        """Samples a second, relative to plain PyTorch on one device."""
        return row.rate / self.plain.rate if row.rate and self.plain.rate else None

    def of_baseline(self, row: BenchmarkRow) -> float | None:
        """Samples a second, relative to the baseline plan."""
        base = 0.0 if self.baseline is None else self.rows[self.baseline].rate
        return row.rate / base if row.rate and base else None

    @property
    def shown(self) -> tuple[BenchmarkRow, ...]:
        """All rows, plain PyTorch first."""
        return (self.plain, *self.rows)


_HEAD = (
    "pins", "samples/s", "of plain", "of baseline", "step", "predicted", "memory", "predicted",
    "  plan",
)  # fmt: skip


def benchmark_text(table: BenchmarkTable) -> str:
    """The table for a terminal, with a newline at the end."""
    rows = [_HEAD, *(_cells(table, row) for row in table.shown)]
    title = f"BENCH   {table.model}, {table.steps} steps each, {table.where}"
    notes = ["samples/s: of the median step ± half the distance of the quartiles"]
    if table.baseline is not None:
        notes.append(f"baseline: {table.rows[table.baseline].pins}")
    lines = (title, "", *right_aligned(rows), "", "; ".join(notes))
    return "\n".join(clipped(line, 140) for line in lines) + "\n"


def _cells(table: BenchmarkTable, row: BenchmarkRow) -> Sequence[str]:
    if row.reason:
        return [row.pins, "-", *[""] * 6, f"  {row.reason}"]

    def ratio(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    return [
        row.pins, f"{number_text(row.rate)} ± {number_text(row.spread)}",
        ratio(table.of_plain(row)), ratio(table.of_baseline(row)), seconds_text(row.median),
        "" if row.predicted_seconds is None else seconds_text(row.predicted_seconds),
        format_bytes(row.memory),
        "" if row.predicted_memory is None else format_bytes(row.predicted_memory),
        f"  {row.plan}",
    ]  # fmt: skip


def benchmark_picture(table: BenchmarkTable) -> str:
    """One picture: bars of samples a second with their spread, and of memory, measured and
    predicted."""
    source = files("graphaccel.report").joinpath("bench.svg.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    rows = [row for row in table.shown if row.seconds]
    rates = [row.rate + row.spread for row in rows]
    rates += [row.batch / row.predicted_seconds for row in rows if row.predicted_seconds]
    return environment.from_string(source).render(
        table=table,
        rows=rows,
        fastest=max(rates, default=1.0),
        largest=max((max(r.memory, r.predicted_memory or 0) for r in rows), default=1) or 1,
        number=number_text,
        size=format_bytes,
    )
