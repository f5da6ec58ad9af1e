"""`graphaccel plan --sweep`: a plan for each size of an axis or combination of pins, as a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TextIO

from graphaccel.cli.jobs import Job
from graphaccel.cli.output import writing
from graphaccel.cli.pin_options import pins_text
from graphaccel.cli.values import NOTHING_FITS
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.sweep import Point, sweep
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.report.sweep import (
    SweepRow,
    SweepTable,
    sweep_html,
    sweep_row,
    sweep_text,
    unit_of,
)


def sweep_command(
    args: argparse.Namespace,
    job: Job,
    compiler: Compiler,
    cluster: Callable[[int], Cluster],
    out: TextIO,
) -> int:
    """Print the table of `args.sweep` to `out`, and write what else was asked for.

    cluster: the hardware with so many devices. Returns 0, or 3 where no size has a plan.
    """
    axis, sizes = args.sweep
    points = tuple(sweep(compiler, job.batch, axis, sizes, cluster))
    steps = [point.planned.step for point in points if point.planned is not None]
    table = SweepTable(
        model=type(job.model).__name__,
        device=compiler.cluster.device.name,
        axis=axis,
        unit=unit_of(steps[0]) if steps else "examples",
        price=args.price,
        rows=tuple(_row(point, args.price) for point in points),
    )
    print(table.to_json() if args.format == "json" else sweep_text(table), end="", file=out)
    if args.html is not None:
        with writing(args.html):
            args.html.write_text(sweep_html(table), encoding="utf-8")
    return 0 if steps else NOTHING_FITS


def _row(point: Point, price: float | None) -> SweepRow:
    size = point.size if isinstance(point.size, int) else pins_text(point.size)
    if point.planned is None:
        return SweepRow(size, reason=point.reason)
    planned = point.planned
    return sweep_row(size, planned.plan, planned.step, planned.cluster, price)
