"""`graphaccel plan`: find the model, plan it, and show the plan in every form asked for."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphaccel.api import cluster_here
from graphaccel.arguments import read_plan
from graphaccel.capture.batch import batch_leaves, resized
from graphaccel.compiler import Compiler
from graphaccel.errors import GraphsNeedGpu
from graphaccel.handle import assumed_of
from graphaccel.ir.program import StepProgram
from graphaccel.jobs import Job, find_job
from graphaccel.measure import measure
from graphaccel.model import Model, check_supported, optimizer_bytes
from graphaccel.planner import whatif
from graphaccel.planner.cluster import Cluster
from graphaccel.planner.cluster import cluster as named_cluster
from graphaccel.planner.cluster_file import read_cluster, write_cluster
from graphaccel.planner.offload import planned_only
from graphaccel.planner.plan import Plan
from graphaccel.planner.record import Record
from graphaccel.planner.solving import solve_all
from graphaccel.report.compare import comparison
from graphaccel.report.explanation import answer_text
from graphaccel.report.export import export
from graphaccel.report.facts import Facts, RankMemory, gather, points, run_spans
from graphaccel.report.format import seconds_text
from graphaccel.report.html import html_page
from graphaccel.report.text import facts_text
from graphaccel.report.trace import trace_json

PINS = (
    "data", "pipeline", "tensor", "context", "expert", "interleave", "microbatches", "zero",
    "sequence", "scatter_sends", "gather_again", "cast_once", "accumulation", "recompute",
    "precision", "vocab", "stages", "ort", "compile", "cuda_graphs", "fusions",
    "loss_chunk", "offload",
)  # fmt: skip
INTERRUPTED = 130  # 128 + SIGINT
_DRAWN = 1500  # candidates that a picture is given; beyond, only those the search solved


def plan_command(args: argparse.Namespace) -> int:
    """Plan `args.target` and print the report; `args` are those of `cli.build_parser()`.

    Returns 0, or 130 where Ctrl-C ended the search and the best plan so far is shown.
    Raises GraphAccelError where there is no plan, KeyboardInterrupt where there is none yet, and
    what the user's file raises.
    """
    if args.compare:
        a, b = args.compare
        print(comparison(_read(a), _read(b), names=(str(a), str(b))), end="")
        return 0
    job = find_job(*args.target)
    check_supported(job.model)
    if args.batch is not None:
        job = replace(job, batch=resized(job.batch, batch_leaves(job.batch)[1], args.batch))
    given = pins_of(args)
    where = chosen_cluster(args)
    model = Model(job.model, job.loss_fn, optimizer_bytes(job.optimizer))
    pins = {**job.pins, **given}
    if pins.get("cuda_graphs") and where.device.name == "cpu":
        raise GraphsNeedGpu(device="cpu")
    compiler = Compiler(model, where, pins)
    record = Record(watch=Progress())
    program: StepProgram | None = None
    try:
        _, plan, program = compiler.choose(job.batch, record)
    except KeyboardInterrupt:
        incumbent = record.incumbent()
        if incumbent is None:
            raise
        plan = incumbent
    facts = _facts(args, job, compiler, record, plan, program)
    _show(args, facts, record)
    return 0 if program is not None else INTERRUPTED


def _facts(
    args: argparse.Namespace,
    job: Job,
    compiler: Compiler,
    record: Record,
    plan: Plan,
    program: StepProgram | None,
) -> Facts:
    """All that the asked outputs need to know. program: None where the search was interrupted."""
    assert record.problem is not None
    assert record.outcome is not None
    layouts = record.problem.layouts
    facts = gather(
        plan,
        layouts.whole.step,
        compiler.cluster,
        model_name=type(job.model).__name__,
        assumed=assumed_of(job.optimizer, plan),
        layouts=layouts,
        program=program,
    )
    drawn = args.html is not None or args.format == "json"
    if program is not None and (drawn or args.trace is not None):
        curves = compiler.curves(plan, program, job.batch, run_spans(facts))
        rows = (RankMemory(rank, samples) for rank, samples in enumerate(curves))
        facts = replace(facts, memory=tuple(rows))
    if drawn:
        found = record.outcome
        if program is not None and found.tally.candidates <= _DRAWN:
            pins = replace(record.pins, spared=plan.offload)
            found = solve_all(record.problem, pins, record.batch, prune=False, build=False)
        plans = (*found.seen, *found.fitting)  # the latter with the times of their schedules
        facts = replace(facts, candidates=points(plans, plan, compiler.cluster))
    if program is not None and (args.explain or args.html is not None):
        facts = replace(facts, explanation=whatif.explain(record, plan))
    if program is not None and args.measure is not None:
        ran = measure(args.target, plan, args.batch, args.measure)
        facts = replace(facts, measured=ran)
    return facts


def _show(args: argparse.Namespace, facts: Facts, record: Record) -> None:
    """Print what is printed and write what is written, with a line for each file."""
    if args.export is not None:
        print(export(facts, args.export), end="")
    elif args.format == "json":
        print(facts.to_json(), end="")
    else:
        print(facts_text(facts if args.explain else replace(facts, explanation=None)), end="")
    for asked in args.why_not:
        answer = whatif.why_not(record, facts.plan, asked)
        print(f"\n{answer_text(answer, facts.plan, facts.cluster)}", end="")
    written = []
    if args.json is not None:
        facts.plan.save(args.json)
        run = f'graphaccel.optimize(model, plan="{args.json}")'
        only = facts.plan.precision.planned_only or planned_only(facts.plan.offload)
        use = "it is planned only, export it" if only else f"run it with  {run}"
        written.append(f"{args.json}: {use}")
    if args.save_cluster is not None:
        write_cluster(facts.cluster, args.save_cluster)
        written.append(f"{args.save_cluster}: plan for it with  --cluster {args.save_cluster}")
    if args.html is not None:
        args.html.write_text(html_page(facts), encoding="utf-8")
        written.append(f"{args.html}: open it in a browser")
    if args.trace is not None:
        args.trace.write_text(trace_json(facts), encoding="utf-8")
        written.append(f"{args.trace}: open it at  https://ui.perfetto.dev")
    data = args.format == "json" or args.export is not None
    out = sys.stderr if data else sys.stdout
    for place, line in enumerate(written):
        blank = "\n" if place == 0 and not data else ""
        print(f"{blank}saved {line}", file=out)


def _read(file: Path) -> Plan:
    plan = read_plan(file, {})
    assert plan is not None
    return plan


def pins_of(args: argparse.Namespace) -> dict[str, Any]:
    """The decisions on the command line."""
    given = {name: getattr(args, name) for name in PINS if getattr(args, name) is not None}
    if "stages" in given:
        given["stages"] = dict(given["stages"])
    return given


def chosen_cluster(args: argparse.Namespace) -> Cluster:
    """The cluster of a file, the devices that were named, or what is here."""
    if args.cluster is not None:
        return read_cluster(args.cluster, args.devices)
    if args.device is None and args.memory is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return cluster_here(args.devices, torch.device(kind))
    return named_cluster(args.device or "cpu", args.devices, args.memory)


class Progress:
    """One line on a terminal that is written over: candidates, the best so far, seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()

    def __call__(self, record: Record) -> None:
        assert record.outcome is not None
        now = time.perf_counter()
        quiet = os.environ.get("GRAPHACCEL_QUIET") == "1"
        if quiet or not sys.stderr.isatty():
            return
        total = record.outcome.tally.candidates
        if record.done == total:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - self._last >= 0.1:
            self._last = now
            best = record.incumbent()
            said = f"{record.done:,} of {total:,} candidates"
            if best is not None and best.prediction is not None:
                said += f", best {seconds_text(best.prediction.seconds)}"
            line = f"\r\x1b[Kgraphaccel: {'plan':<10} {said:<60} {now - self._start:6.1f} s"
            print(line, end="", file=sys.stderr, flush=True)
