"""`graphaccel bench`: runs plans side by side, and plain PyTorch beside them."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphaccel.cli.pin_options import add_pins, pin_grid, pin_pairs, pins_of, pins_text
from graphaccel.cli.values import NOTHING_FITS, contradiction_of, output_file, target
from graphaccel.planner.plan.option_values import byte_count, positive

if TYPE_CHECKING:
    from graphaccel.compiler.sweep import Point
    from graphaccel.report.bench import BenchmarkRow

_PLAIN = "plain PyTorch, 1 device"
Sizes = tuple[int, Mapping[int, int]] | None


def add_benchmark(commands: Any) -> None:
    """Add the command and its options to the command line."""
    bench = commands.add_parser(
        "bench",
        help="run plans side by side: samples a second, memory, predicted beside measured",
        description="Train some steps of each combination of pins on this machine, and of plain "
        "PyTorch on one device. Nothing is saved of what is trained.",
    )
    add = bench.add_argument
    add("target", metavar="SCRIPT[:FUNCTION]", type=target, help="as for plan")
    add("--sweep", type=pin_grid, required=True, metavar="NAME=VALUES",
        help='combinations of pins: "zero=0,1 tensor=1,2"')  # fmt: skip
    add("--devices", type=positive, default=1, metavar="N", help="processes of each plan (1)")
    add("--steps", type=positive, default=10, metavar="N", help="that are timed (10)")
    add("--batch", type=positive, metavar="N", help="global batch size")
    add("--baseline", type=pin_pairs, metavar="PINS",
        help='the plan others are compared with, of the sweep: "zero=0,tensor=1" (the first '
        "that runs)")  # fmt: skip
    add("--memory", type=byte_count, metavar="SIZE", help="of one device: 80GiB")
    add("--cluster", type=Path, metavar="FILE", help="what `graphaccel calibrate` measured here")
    add("--json", type=output_file, metavar="FILE", help="save all figures")
    add("--svg", type=output_file, metavar="FILE", help="save the picture")
    add_pins(bench)
    bench.set_defaults(run_command=benchmark_command, device=None, usage_error=bench.error)


def benchmark_command(args: argparse.Namespace) -> int:
    """Run every combination of `args.sweep`; print the table. Returns 0, or 3 where no plan ran."""
    twice = contradiction_of("pins", args.sweep, args)
    if twice is not None:
        args.usage_error(twice)
    if args.baseline is not None and args.baseline not in args.sweep:
        args.usage_error(f"--baseline {pins_text(args.baseline)} is no combination of --sweep")
    from graphaccel.cli.output import report_alone, writing
    from graphaccel.report.bench import benchmark_picture, benchmark_text

    with report_alone() as out:
        table = _table(args)
        print(benchmark_text(table), end="", file=out)
        for file, text in ((args.json, table.to_json()), (args.svg, benchmark_picture(table))):
            if file is not None:
                with writing(file):
                    file.write_text(text, encoding="utf-8")
                print(f"saved {file}", file=out)
    return 0 if table.baseline is not None else NOTHING_FITS


def _table(args: argparse.Namespace) -> Any:
    from dataclasses import replace

    from graphaccel.cli.jobs import batch_asked, find_job
    from graphaccel.cli.measure import check_here, machine
    from graphaccel.cli.plan import chosen_cluster
    from graphaccel.compiler.compiler import Compiler
    from graphaccel.compiler.model import check_supported, model_of
    from graphaccel.compiler.sweep import sweep
    from graphaccel.planner.cluster.cluster import cluster_name
    from graphaccel.report.bench import BenchmarkTable

    where = chosen_cluster(args)
    check_here(cluster_name(where), where.count)
    job = find_job(*args.target)
    args.batch = batch_asked(args.batch, job, where.count)
    check_supported(job.model)
    model = model_of(
        job.model, job.loss_fn, job.optimizer, where.device.type, batch_dims=job.batch_dims
    )
    compiler = Compiler(model, where, {**job.pins, **pins_of(args)})
    sizes: Sizes = None
    if args.batch is not None:
        job = replace(job, batch=compiler.of_size(job.batch, args.batch))
        sizes = args.batch, compiler.capture(job.batch)[0].batch_dims
    points = list(sweep(compiler, job.batch, "pins", args.sweep, lambda count: where))
    rows = tuple(_row(args, point, sizes) for point in points)
    batch = next((p.planned.plan.batch for p in points if p.planned is not None), args.batch or 1)
    ran = [number for number, row in enumerate(rows) if row.seconds]
    if args.baseline is not None:
        ran = [number for number in ran if args.sweep[number] == args.baseline]
    return BenchmarkTable(
        model=type(job.model).__name__,
        where=machine(args.devices),
        steps=args.steps,
        plain=_plain(args, batch, sizes),
        rows=rows,
        baseline=ran[0] if ran else None,
    )


def _row(args: argparse.Namespace, point: Point, sizes: Sizes) -> BenchmarkRow:
    from graphaccel.cli.measure import run_apart
    from graphaccel.errors import GraphMisuse
    from graphaccel.planner.plan.plan_name import plan_name
    from graphaccel.progress import progress
    from graphaccel.report.bench import BenchmarkRow
    from graphaccel.report.format import seconds_text

    assert not isinstance(point.size, int)
    name = pins_text(point.size)
    if point.planned is None:
        return BenchmarkRow(name, reason=point.reason)
    plan = point.planned.plan
    assert plan.prediction is not None
    start = time.perf_counter()
    try:
        run = run_apart(args.target, plan, sizes, args.steps)
    except GraphMisuse as error:
        return BenchmarkRow(name, plan_name(plan), reason=error.what)
    progress("bench", f"{name}: {seconds_text(statistics.median(run.seconds))} a step",
             time.perf_counter() - start)  # fmt: skip
    return BenchmarkRow(
        pins=name,
        plan=plan_name(plan),
        batch=plan.batch,
        seconds=run.seconds,
        memory=max(run.memory),
        predicted_seconds=plan.prediction.seconds,
        predicted_memory=max(stage.tensors for stage in plan.prediction.memory),
    )


def _plain(args: argparse.Namespace, batch: int, sizes: Sizes) -> BenchmarkRow:
    from graphaccel.cli.measure import run_apart
    from graphaccel.errors import GraphMisuse
    from graphaccel.report.bench import BenchmarkRow

    try:
        run = run_apart(args.target, None, sizes, args.steps)
    except GraphMisuse as error:
        return BenchmarkRow(_PLAIN, reason=error.what)
    return BenchmarkRow(_PLAIN, batch=batch, seconds=run.seconds, memory=max(run.memory))
