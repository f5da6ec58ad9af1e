"""`graphaccel calibrate`: measures on this machine the rates that a plan otherwise estimates."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from graphaccel.capture.batch import Batch
from graphaccel.cli.calibration import measured
from graphaccel.cli.jobs import find_job
from graphaccel.cli.output import writing
from graphaccel.cli.plan import chosen_cluster, pins_of
from graphaccel.compat.torch.graphs import BoxedCode
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, optimizer_bytes
from graphaccel.errors import OrtMissing
from graphaccel.errors.messages import columns
from graphaccel.ir.program import StageProgram
from graphaccel.ort.kernels import Kernels, installed, missing_reason
from graphaccel.ort.measure import (
    RegionCost,
    calibration_name,
    example_inputs,
    in_step,
    measure,
    side_by_side,
)
from graphaccel.ort.session import Sessions
from graphaccel.passes.place_ort import Tools, place_ort
from graphaccel.passes.select_matmul_backend import select_matmul_backend
from graphaccel.planner.cluster.cluster import Cluster, OpTime
from graphaccel.planner.cluster.cluster_file import write_cluster

_MEMORIES = 3  # memory allocations in which a step is timed


def calibrate_command(args: argparse.Namespace) -> int:
    """Measure the ops of `args.target`, or its regions under its plan; write the cluster file
    `args.output`.

    Keeps what the file at `args.cluster` already contains. Returns 0. Raises OrtMissing (GA801)
    without ONNX Runtime, and what planning raises.
    """
    if not args.regions:
        return _calibrate_ops(args)
    kernels = installed()
    if kernels is None:
        raise OrtMissing(asked="calibrate --ort", reason=missing_reason())
    if args.threads:
        torch.set_num_threads(args.threads)
    job = find_job(*args.target)
    where = chosen_cluster(args)
    model = Model(job.model, job.loss_fn, optimizer_bytes(job.optimizer))
    pins = {**job.pins, **pins_of(args), "ort": "auto"}
    costs = region_costs(Compiler(model, where, pins), job.batch, kernels, _progress)
    name = calibration_name(kernels.name, torch.get_num_threads())
    known = {**where.ort.get(name, {}), **{c.key: (c.torch, c.ort) for c in costs}}
    with writing(args.output):
        write_cluster(replace(where, ort={**where.ort, name: known}), args.output)
    print(table(costs, name))
    print(f"\nsaved {args.output}: use it with  graphaccel plan ... --cluster {args.output}")
    return 0


def _calibrate_ops(args: argparse.Namespace) -> int:
    cluster = measured(chosen_cluster(args), args.target, args.threads)
    with writing(args.output):
        write_cluster(cluster, args.output)
    print(op_table(cluster))
    print(f"\nsaved {args.output}: use it with  graphaccel plan ... --cluster {args.output}")
    return 0


def op_table(cluster: Cluster) -> str:
    """The measurements as text: each op, at how many sizes, and the best rate it reached."""
    results: dict[str, list[OpTime]] = {}
    for row in cluster.device.measured:
        results.setdefault(row.op, []).append(row)
    rows = [("op", "sizes", "shortest", "longest", "best rate")]
    for op, times in sorted(results.items(), key=lambda item: -sum(t.seconds for t in item[1])):
        best = max(times, key=lambda t: (t.flops or t.bytes) / t.seconds)
        rate = (best.flops or best.bytes) / best.seconds / 1e9
        rows.append(
            (
                op,
                str(len(times)),
                f"{1e6 * min(t.seconds for t in times):.0f} us",
                f"{1e6 * max(t.seconds for t in times):.0f} us",
                f"{rate:.1f} {'GFLOP/s' if best.flops else 'GB/s'}",
            )
        )
    link = cluster.links[0]
    said = [f"{cluster.count} x {cluster.device.name}, measured at the same time"]
    if cluster.count > 1:
        for of in (link, *link.measured):
            rates = f"{1e6 * of.latency_seconds:.0f} us a hop, {of.bandwidth / 1e9:.2f} GB/s"
            said.append(f"{of.name}: {rates}")
    return "\n".join([*said, "", *columns(rows)])


def region_costs(
    compiler: Compiler,
    batch: Batch,
    kernels: Kernels,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[RegionCost]:
    """Every distinct region of the plan that `compiler` chooses, measured in torch and in ONNX
    Runtime; torch runs the region as the later passes rewrite it.

    Regions that are faster in isolation are then measured together in whole steps, until the
    remaining ones gain what they promise (on one device: the programs of several wait for each
    other).
    """
    stage_programses: list[Sequence[StageProgram]] = []
    compiler.regions.watch(Tools(kernels, Sessions(), watch=stage_programses.append))
    plan = compiler.choose(batch).plan
    programs = stage_programses[-1]
    costs = measure(programs, kernels, _ours, progress)
    while plan.devices == 1:
        wins = frozenset(c.key for c in costs if c.wins)
        placed, report = place_ort(programs, plan, Tools(kernels, Sessions(), wins))
        calls = Counter(r.key for r in report.regions) if report is not None else Counter()
        if not calls:
            break
        costs = in_step(costs, calls, *_steps(programs, placed))
        if wins == frozenset(c.key for c in costs if c.wins):
            break
    return costs


def _ours(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph after the later passes."""
    return select_matmul_backend(StageProgram(0, graph, (), (), {}, (), ())).forward


def _steps(
    programs: Sequence[StageProgram], placed: Sequence[StageProgram]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of some steps without regions and with, each on memory of its own."""
    pairs = [(_step(programs), _step(placed)) for _ in range(_MEMORIES)]
    without, with_regions = zip(*(side_by_side(*pair) for pair in pairs), strict=True)
    return without, with_regions


def _step(programs: Sequence[StageProgram]) -> Callable[[], None]:
    """A function that runs the forward and the backward of programs, each on inputs of its own."""
    graphs = [_ours(g) for p in programs for g in (p.forward, *p.backwards.values())]
    for graph in graphs:  # one list of inputs, as the runtime calls them
        graph.graph.set_codegen(BoxedCode())
        graph.recompile()
    given = [example_inputs(graph.graph) for graph in graphs]

    def run() -> None:
        for graph, inputs in zip(graphs, given, strict=True):
            graph(list(inputs))

    return run


def table(costs: list[RegionCost], name: str) -> str:
    """The costs as text, the largest gain first."""
    wins = [c for c in costs if c.wins]
    rows = [("region", "phase", "ops", "torch", "onnxruntime", "ratio", "")]
    for cost in sorted(costs, key=lambda c: c.ort - c.torch):
        rows.append(
            (
                cost.module or "(model)",
                cost.phase,
                str(cost.ops),
                f"{1e3 * cost.torch:.3f} ms",
                f"{1e3 * cost.ort:.3f} ms",
                f"{cost.torch / cost.ort:.2f}",
                "faster" if cost.wins else "",
            )
        )
    head = f"onnxruntime {name}: {len(wins)} of {len(costs)} regions are faster than torch"
    return "\n".join([head, *columns(rows)])


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty() and os.environ.get("GRAPHACCEL_QUIET") != "1":
        end = "\n" if done == of else ""
        print(f"\rgraphaccel: measure    {done}/{of}", end=end, file=sys.stderr)
