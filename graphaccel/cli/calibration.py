"""Measures the time of a model's ops on this machine, and of collectives between processes.

Each of `devices` processes runs the model by itself, all at once, since they share cores and memory
as they will in training: whole steps, then every node of the stage's graphs in place. The nodes'
times are scaled so that their sum equals the step's time without its optimizer. Then all-reduces
and the other collectives are timed at several sizes, for latency and bandwidth of each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx

import graphaccel
from graphaccel.capture.batch import batch_leaves
from graphaccel.capture.export.export import find_loss
from graphaccel.cli.jobs import find_job
from graphaccel.cli.measure import materialise, random_batch
from graphaccel.errors import GraphMisuse
from graphaccel.ir.program import StageProgram
from graphaccel.ort.measure import example_inputs
from graphaccel.planner.cluster.cluster import COLLECTIVES, Cluster, Collective, Link, OpTime
from graphaccel.planner.profile.cost import OPTIMIZER, program_work
from graphaccel.planner.profile.efficiency import Work
from graphaccel.runtime.gloo import for_gloo
from graphaccel.runtime.launch import check_devices

c10d = torch.ops._c10d_functional
_SUMS = {torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default}  # `accumulate_gradients`
_WARM, _RUNS = 2, 5
_TURNS = 11  # rounds of steps and of each collective: other processes disturb them more than ops
_MOST_SIZES = 4
_CACHES = 64 << 20  # bytes: in a step, what is sent is not in the caches
_MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 25 << 20)  # bytes; the last is a full bucket


def measured(
    cluster: Cluster, target: tuple[Path, str | None], threads: int | None = None
) -> Cluster:
    """`cluster` with the rates that the model of `target` reaches on this machine.

    Raises GraphMisuse (GA407) for a run that fails, its own error being on stderr; TooManyDevices
    (GA205).
    """
    check_devices(cluster.count)
    file, function = target
    with tempfile.TemporaryDirectory(prefix="graphaccel_") as folder:
        out = Path(folder, "calibration.json")
        job = [str(file), *(["--function", function] if function else []), "--out", str(out)]
        counts = ["--threads", str(threads)] if threads else []
        launcher = [sys.executable, "-m", "graphaccel.runtime.launch", str(cluster.count)]
        code = subprocess.run(
            [*launcher, sys.executable, "-u", "-m", "graphaccel.cli.calibration", *job, *counts],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "GRAPHACCEL_QUIET": "1"},
            check=False,
        ).returncode
        if code:
            raise GraphMisuse(what=f"the calibrating run ended with exit code {code}")
        match = json.loads(out.read_text())
    ops = tuple(OpTime(**row) for row in match["ops"])
    links = cluster.links
    if match["rates"]:
        rates = {kind: Collective(kind, *pair) for kind, pair in match["rates"].items()}
        whole, rows = rates["all-reduce"], tuple(rates[kind] for kind in COLLECTIVES)
        hop, bandwidth = whole.latency_seconds, whole.bandwidth
        links = (Link(links[0].name, hop, bandwidth, cluster.count, rows),)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    oversubscription = max(1.0, cluster.count * match["threads"] / (cores or 1))
    device = replace(cluster.device, measured=ops, crowd=oversubscription, stands_for="")
    return replace(cluster, device=device, links=links)


def _work(args: argparse.Namespace) -> None:
    """One process's part; rank 0 writes the mean over all."""
    if args.threads:
        torch.set_num_threads(args.threads)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    times: dict[OpTime, list[float]] = defaultdict(list)
    for microbatches in _counts(args):
        for row, seconds in _of_plan(args, microbatches).items():
            times[row].append(seconds)
    mine = {row: statistics.fmean(each) for row, each in times.items()}
    everyone: list[Any] = [mine] * world
    if world > 1:
        dist.all_gather_object(everyone, mine)
    rates = _rates(world) if world > 1 else {}
    if int(os.environ.get("RANK", "0")) == 0:
        ops = [
            asdict(replace(row, seconds=statistics.fmean(each[row] for each in everyone)))
            for row in mine
        ]
        said = {"ops": ops, "rates": rates, "threads": torch.get_num_threads()}
        args.out.write_text(json.dumps(said))
    if world > 1:
        dist.destroy_process_group()


def _counts(args: argparse.Namespace) -> list[int]:
    """Microbatch counts that plans are likely to have: a few divisors of the batch."""
    size, _ = batch_leaves(find_job(args.file, args.function).batch)
    return [n for n in range(1, size + 1) if size % n == 0][:_MOST_SIZES]


def _of_plan(args: argparse.Namespace, microbatches: int) -> dict[OpTime, float]:
    """Seconds of each op of a step with this many microbatches, by what it computes."""
    job = find_job(args.file, args.function)
    materialise(job)
    batch = random_batch(job.batch)
    inputs, named = batch.rebuild(batch.leaves)
    model, optimizer = job.model, job.optimizer
    graphaccel.optimize(  # type: ignore[call-overload]
        model,
        optimizer,
        loss_fn=job.loss_fn,
        devices=1,
        microbatches=microbatches,
        recompute="none",
        ort="off",
    )

    def gradients() -> None:
        loss = find_loss(model(*inputs, **named))
        assert loss is not None  # the plan was made with it
        loss.backward()

    def change() -> None:
        if optimizer is not None:
            optimizer.step()

    whole, changing = _in_turn([gradients, change], after=model.zero_grad)
    handle: Any = model.graphaccel
    (program,) = handle.program.stages
    alone, total = _nodes(program, microbatches)
    results = {row: seconds * whole / total for row, seconds in alone.items()}
    if optimizer is not None and microbatches == 1:
        trained = [p for p in model.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in trained)
        results[OpTime(OPTIMIZER, bytes=size, count=len(trained))] = changing
    return results


def _nodes(program: StageProgram, microbatches: int) -> tuple[dict[OpTime, float], float]:
    """(seconds of a call by what it computes, seconds of a step's calls that a plan counts).

    What a plan does not count, views and sums over microbatches, is thereby included in what it
    counts.
    """
    often = [(program.forward, microbatches)]
    for (first, last), graph in program.backwards.items():
        often.append((graph, 1 if first or last else microbatches - 2))
    times: dict[OpTime, list[tuple[float, int]]] = defaultdict(list)
    total = 0.0
    for graph, runs in often:
        for node, each in _timed(graph).items():
            work = program_work(node)
            if work is None:
                continue
            times[_row(work)].append((each, runs))
            total += runs * each * (node.target not in _SUMS)
    results = {
        row: sum(seconds * runs for seconds, runs in each) / sum(runs for _, runs in each)
        for row, each in times.items()
    }
    return results, total


def _row(work: Work) -> OpTime:
    sizes = work.rows, work.columns, work.inner, work.count
    return OpTime(work.name, work.dtype, work.flops, work.bytes, *sizes)


class _Timed(fx.Interpreter):
    """Runs a graph, and records how long each call took."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seconds: dict[fx.Node, list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        """The node's result."""
        start = _now()
        result = super().run_node(n)
        if n.op == "call_function":
            self.seconds[n].append(_now() - start)
        return result


def _timed(graph: fx.GraphModule) -> dict[fx.Node, float]:
    """Median seconds of each call of a graph, run in its order on inputs of its shapes."""
    run = _Timed(graph)
    with torch.no_grad():
        for _ in range(_WARM + _RUNS):
            run.run(*example_inputs(graph.graph))
    return {node: statistics.median(each[_WARM:]) for node, each in run.seconds.items()}


def _rates(world: int) -> dict[str, tuple[float, float]]:
    """(seconds of a hop, bytes/s) of each collective, fitted by least relative error: an all-reduce
    makes a ring's two passes, the others one. A pass has n - 1 hops, in which (n - 1) / n of the
    bytes pass every process."""
    rows: dict[str, list[list[float]]] = defaultdict(list)
    other = torch.zeros(_CACHES // 4)
    for wanted in _MESSAGES:
        data = torch.zeros(wanted // 4 // world * world)
        calls = _collectives(data, world)
        seconds = _in_turn([*calls.values()], before=lambda: other.add_(1.0))
        size = data.numel() * data.element_size()
        for kind, each in zip(calls, seconds, strict=True):
            hops = (2 if kind == "all-reduce" else 1) * (world - 1)
            rows[kind].append([hops / each, hops / world * size / each])
    return {kind: _fitted(match) for kind, match in rows.items()}


def _collectives(data: torch.Tensor, world: int) -> dict[str, Callable[[], object]]:
    """Each collective on about the bytes of `data`, in the form in which a step has it."""
    each = data.numel() // world
    counts = [each] * world
    part = data[:each]
    return {
        "all-reduce": lambda: dist.all_reduce(data),
        "reduce-scatter": _called(c10d.reduce_scatter_tensor.default, data, each, "sum", world),
        "all-gather": _called(c10d.all_gather_into_tensor.default, part, data.numel(), world),
        "all-to-all": _called(c10d.all_to_all_single.default, data, data.numel(), counts, counts),
    }


def _called(target: Any, given: torch.Tensor, count: int, *args: Any) -> Callable[[], object]:
    """A graph of one collective, called on `given`, that returns `count` elements."""
    graph = fx.Graph()
    source = graph.placeholder("given")
    source.meta["val"] = given.to("meta")
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    sent = graph.call_function(target, (source, *args, name))
    sent.meta["val"] = source.meta["val"].new_empty(count)
    graph.output(graph.call_function(c10d.wait_tensor.default, (sent,)))
    for_gloo(sent, dist.get_rank())
    called = fx.GraphModule({}, graph)
    return lambda: called(given)


def _now() -> float:
    """The time in seconds, once the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _in_turn(
    calls: Sequence[Callable[[], object]],
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Median seconds of each call, one run of all after the other, as in a step: other load on the
    machine slows them equally, and each finds the caches as the others leave them. Of the processes
    the slowest counts in each round: the others wait for it. before: each call; after: each round.
    """
    times: list[list[float]] = []
    for _ in range(_WARM + _TURNS):
        times.append([])
        for call in calls:
            before()
            if dist.is_initialized():
                dist.barrier()
            start = _now()
            call()
            times[-1].append(_now() - start)
        after()
    seconds = torch.tensor(times[_WARM:])
    if dist.is_initialized():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.median(dim=0).values.tolist()


def _fitted(rows: list[list[float]]) -> tuple[float, float]:
    (latency, each), *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    least = 1e-9
    return max(float(latency), least), 1 / max(float(each), 1e-15)


def _main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m graphaccel.cli.calibration", allow_abbrev=False
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--function")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, required=True)
    _work(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
