"""`graphaccel plan`: finds the model, plans it, and shows the plan in every requested form."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from graphaccel.api import cluster_here
from graphaccel.arguments import check_can_run, read_plan, with_checkpointing
from graphaccel.cli.jobs import Job, batch_asked, find_job
from graphaccel.cli.measure import check_here, measure
from graphaccel.cli.output import report_alone, writing
from graphaccel.cli.pin_options import pins_of
from graphaccel.cli.sweep import sweep_command
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import check_supported, model_of
from graphaccel.compiler.program_memory import ProgramMemory
from graphaccel.errors import GraphAccelError, GraphMisuse, GraphsNeedGpu
from graphaccel.ir.program import StepProgram
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.cluster import Cluster, cluster_name
from graphaccel.planner.cluster.cluster_file import read_cluster, write_cluster
from graphaccel.planner.estimate.estimate import predict_seconds
from graphaccel.planner.explain import what_if as whatif
from graphaccel.planner.explain.lower_precision import bf16_gain
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.rate_correction import model_key, step_time, with_step
from graphaccel.planner.search.branch_and_bound import solve_all
from graphaccel.planner.search.record import Record
from graphaccel.progress import print_styled, progress
from graphaccel.proof.comparison import pair_of
from graphaccel.proof.first_step import prove
from graphaccel.report.assumptions import assumed_of
from graphaccel.report.brief import brief_text
from graphaccel.report.compare import comparison
from graphaccel.report.export import export, refusals
from graphaccel.report.facts import Facts, RankMemory, gather, points, run_spans
from graphaccel.report.format import seconds_text
from graphaccel.report.html import html_page
from graphaccel.report.text import facts_text
from graphaccel.report.trace import trace_json

_VERDICTS = {
    "; safe:": "green",
    "; likely:": "yellow",
    "; risky:": "bold yellow",
    "; impossible:": "bold red",
}
INTERRUPTED = 130  # 128 + SIGINT
_DRAWN = 1500  # candidates drawn in a picture; if there are more, only those the search solved


def plan_command(args: argparse.Namespace) -> int:
    """Plan `args.target` and print the report; `args` are those of `cli.build_parser()`.

    Returns 0, or 130 where Ctrl-C ended the search and the best plan so far is shown.
    Raises GraphAccelError where no plan exists, KeyboardInterrupt where none was found yet, and
    what the user's file raises.
    """
    with report_alone() as out:
        if args.compare:
            a, b = args.compare
            print(comparison(_read(a), _read(b), names=(str(a), str(b))), end="", file=out)
            return 0
        return _plan_job(args, out)


def _plan_job(args: argparse.Namespace, out: TextIO) -> int:
    """Plan one job and print the report to `out`."""
    where = chosen_cluster(args)
    if args.measure is not None:
        check_here(cluster_name(where), where.count)
    job = find_job(*args.target)
    args.batch = batch_asked(args.batch, job, where.count)
    check_supported(job.model)
    model = model_of(
        job.model, job.loss_fn, job.optimizer, where.device.type, batch_dims=job.batch_dims
    )
    pins = with_checkpointing(job.model, {**job.pins, **pins_of(args)})
    if pins.get("cuda_graphs") and where.device.name == "cpu":
        raise GraphsNeedGpu(device="cpu")
    if args.measure is not None:
        check_can_run(None, pins)
    compiler = Compiler(model, where, pins)
    if args.batch is not None:
        job = replace(job, batch=compiler.of_size(job.batch, args.batch))
    if args.sweep is not None:
        clusters = partial(chosen_cluster, args)
        return sweep_command(args, job, compiler, clusters, out)
    if args.check:
        step, sizes = compiler.capture(job.batch)
        prove(pair_of(job.model, job.loss_fn, step, job.batch, sizes))
    record = Record(watch=Progress())
    program: StepProgram | None = None
    try:
        chosen = compiler.choose(job.batch, record)
        plan, program = chosen.plan, chosen.program
    except KeyboardInterrupt:
        incumbent = record.incumbent()
        if incumbent is None:
            raise
        plan = incumbent
    result = _PlannedJob(args, job, where, compiler, record, plan, program)
    if args.export is not None:
        result = _sayable(result, args.export, pins)
        plan, program = result.plan, result.program
    written = _save(args, plan)
    facts, problem = _with_extras(result)
    try:
        _show(args, facts, out)
    finally:  # also for a plan that another system cannot run
        _say((*written, *_write(result, facts)), args, out)
    if problem is not None:
        raise problem
    return 0 if program is not None else INTERRUPTED


@dataclass(frozen=True)
class _PlannedJob:
    """A plan, and what it was found with. where: the cluster with its own rates, before correction
    by measured steps. program: None where the search was interrupted."""

    args: argparse.Namespace
    job: Job
    where: Cluster
    compiler: Compiler
    record: Record
    plan: Plan
    program: StepProgram | None

    @property
    def cluster(self) -> Cluster:
        """The cluster with the rates that the search used."""
        assert self.record.problem is not None
        return self.record.problem.cluster

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        assert self.plan.prediction is not None
        return self.plan.prediction.seconds

    def sized(self) -> tuple[int, Mapping[int, int]] | None:
        """The batch size that was asked for, and the batch dims of the inputs."""
        size = self.args.batch
        return None if size is None else (size, self.compiler.capture(self.job.batch)[0].batch_dims)

    def facts(self) -> Facts:
        """Facts about the plan itself."""
        assert self.record.problem is not None
        layouts = self.record.problem.layouts
        facts = gather(
            self.plan,
            layouts.whole.step,
            self.cluster,
            model_name=type(self.job.model).__name__,
            assumed=assumed_of(self.job.optimizer, self.plan),
            layouts=layouts,
            program=self.program,
        )
        assert facts.throughput is not None
        faster = bf16_gain(self.record.problem, self.plan)
        return replace(facts, throughput=replace(facts.throughput, faster=faster))

    def with_pins(self, pins: Mapping[str, object]) -> _PlannedJob | None:
        """Plan again with these pins; None where there is no such plan."""
        compiler, record = self.compiler.with_pins(pins), Record(watch=Progress())
        try:
            chosen = compiler.choose(self.job.batch, record)
            plan, program = chosen.plan, chosen.program
        except GraphAccelError:
            return None
        return replace(self, compiler=compiler, record=record, plan=plan, program=program)

    def curves(self, facts: Facts) -> Facts:
        """Add the bytes on each rank over the step."""
        assert self.program is not None
        spans = run_spans(facts)
        model, batch = self.compiler.model, self.job.batch
        memory = ProgramMemory(model, self.cluster, batch, self.plan, self.program)
        curves = memory.curves(spans)
        rows = (RankMemory(rank, samples) for rank, samples in enumerate(curves))
        return replace(facts, memory=tuple(rows))

    def candidates(self, facts: Facts) -> Facts:
        """Add every candidate, or those that the search solved where they are too many."""
        record, plan = self.record, self.plan
        assert record.problem is not None
        assert record.outcome is not None
        results = [record.outcome]
        if self.program is not None and results[0].tally.candidates <= _DRAWN:
            results = [  # also those without offload, where that was not asked for
                solve_all(record.problem, replace(record.pins, spared=spared), record.batch,
                          prune=False, build=False)
                for spared in dict.fromkeys((plan.offload, ()))
                if record.pins.offload is None or spared == plan.offload
            ]  # fmt: skip
        # plans that fit come with the times of their simulated schedule
        plans = [plan for one in results for plan in (*one.seen, *one.fitting)]
        return replace(facts, candidates=points(plans, plan, self.cluster))

    def explained(self, facts: Facts) -> Facts:
        """Add the reasons for each decision."""
        return replace(facts, explanation=whatif.explain(self.record, self.plan))

    def measured(self, facts: Facts) -> Facts:
        """Add a measured run on this machine."""
        args = self.args
        if args.refine is not None and self.plan.offload:
            raise GraphMisuse(
                what="--refine of a plan that keeps something on the host: copies are timed with "
                "the rest of the step, and no rate is told from another",
                help_line="--offload none, or leave --refine out",
            )
        return replace(facts, measured=measure(args.target, self.plan, self.sized(), args.measure))

    def with_measured(self, facts: Facts) -> Cluster:
        """The cluster with the measured step added."""
        problem, measured, plan = self.record.problem, facts.measured, self.plan
        assert problem is not None
        assert measured is not None
        profile = problem.layouts.of(plan)
        predicted = predict_seconds(profile, plan, self.where, problem.optimizer_bytes)
        step = step_time(
            plan,
            predicted,
            model_key(problem.layouts.whole),
            type(self.job.model).__name__,
            measured.seconds,
            measured.optimizer,
        )
        return with_step(self.where, step)

    def answered(self, asked: Mapping[str, object]) -> Callable[[Facts], Facts]:
        """Add the answer to one more `--why-not`."""

        def replan(pins: Mapping[str, object]) -> Plan:
            return self.compiler.with_pins(pins).choose(self.job.batch).plan

        def answer(facts: Facts) -> Facts:
            result = whatif.why_not(self.record, self.plan, asked, replan)
            return replace(facts, answers=(*facts.answers, result))

        return answer

    def extras(self) -> Iterator[tuple[str, Callable[[Facts], Facts] | None]]:
        """(what, function that adds it) for everything slow that was asked for; None for what is
        not started after Ctrl-C."""
        args, ended = self.args, self.program is None
        drawn = args.html is not None or args.format == "json"
        if drawn or args.trace is not None:
            yield "memory over the step", None if ended else self.curves
        if drawn:
            yield "candidates", self.candidates
        if args.explain or args.html is not None:
            yield "decisions", None if ended else self.explained
        for asked in args.why_not:
            yield "--why-not", None if ended else self.answered(asked)
        if args.measure is not None:
            yield "--measure", None if ended else self.measured


def _sayable(planned_job: _PlannedJob, target: str, pins: Mapping[str, object]) -> _PlannedJob:
    """The plan, or one that `target` can express: for a decision that it cannot, plan again with
    each value that it can, and take the fastest, until all can be expressed. Nothing in `pins` is
    changed; a plan with a decision that cannot be replaced stays as it is, to be refused."""
    best, decided = planned_job, dict(pins)
    while best.program is not None and (left := refusals(best.facts(), target)):
        choices = [one.instead for one in left]
        if any(not each or any(decided.get(name) is not None for name, _ in each)
               for each in choices):  # fmt: skip
            return planned_job
        start = time.perf_counter()
        try:
            tried = [(choice, best.with_pins(decided | dict([choice]))) for choice in choices[0]]
        except KeyboardInterrupt:  # the plan itself is saved, if that was asked for
            return planned_job
        fitting = [(choice, one) for choice, one in tried if one is not None]
        if not fitting:
            return planned_job
        (name, value), best = min(fitting, key=lambda each: each[1].seconds)
        decided[name] = value
        pin = f"--{name.replace('_', '-')} {str(value).lower()}"
        said = f"{pin}, as {target} has it: {best.seconds / planned_job.seconds:.2f} x the time"
        progress("export", said, time.perf_counter() - start)
    return best


def _with_extras(planned_job: _PlannedJob) -> tuple[Facts, BaseException | None]:
    """All facts that the requested outputs need, and what stopped them from being complete: the
    plan that was found is shown in any case."""
    facts, left = planned_job.facts(), []
    problem: BaseException | None = None
    for what, extra in planned_job.extras():
        if extra is None or problem is not None:
            left.append(what)
            continue
        try:
            facts = extra(facts)
        except (KeyboardInterrupt, Exception) as error:
            problem = error
            left.append(what)
    if left:
        print(f"graphaccel: left out: {', '.join(dict.fromkeys(left))}", file=sys.stderr)
    return facts, problem


def _show(args: argparse.Namespace, facts: Facts, out: TextIO) -> None:
    """Print the report."""
    if args.export is not None:
        shown = export(facts, args.export)
    elif args.format == "json":
        shown = facts.to_json()
    else:
        shown = facts_text(facts) if args.explain else brief_text(facts)
    print_styled(shown, {} if args.export or args.format == "json" else _VERDICTS, out, end="")


def _save(args: argparse.Namespace, plan: Plan) -> list[str]:
    """Save the plan before anything else can fail; returns the line that reports it."""
    if args.json is None:
        return []
    with writing(args.json):
        plan.save(args.json)
    run = f'graphaccel.optimize(model, plan="{args.json}")'
    only = plan.precision.planned_only
    use = "it is planned only, export it" if only else f"run it with  {run}"
    return [f"{args.json}: {use}"]


def _write(planned_job: _PlannedJob, facts: Facts) -> Iterator[str]:
    """Write the other files that were asked for, with a line for each."""
    args = planned_job.args
    if args.save_cluster is not None:
        with writing(args.save_cluster):
            write_cluster(planned_job.where, args.save_cluster)
        yield f"{args.save_cluster}: plan for it with  --cluster {args.save_cluster}"
    if args.refine is not None and facts.measured is not None:
        with writing(args.refine):
            write_cluster(planned_job.with_measured(facts), args.refine)
        yield f"{args.refine}: predicted by this step are plans with  --cluster {args.refine}"
    if args.html is not None:
        with writing(args.html):
            args.html.write_text(html_page(facts), encoding="utf-8")
        yield f"{args.html}: open it in a browser"
    if args.trace is not None:
        with writing(args.trace):
            args.trace.write_text(trace_json(facts), encoding="utf-8")
        yield f"{args.trace}: open it at  https://ui.perfetto.dev"


def _say(written: Iterable[str], args: argparse.Namespace, out: TextIO) -> None:
    """Print which files were saved, to stderr where stdout has data."""
    data = args.format == "json" or args.export is not None
    for place, line in enumerate(written):
        blank = "\n" if place == 0 and not data else ""
        print(f"{blank}saved {line}", file=sys.stderr if data else out)


def _read(file: Path) -> Plan:
    plan = read_plan(file, {})
    assert plan is not None
    return plan


def chosen_cluster(args: argparse.Namespace, devices: int | None = None) -> Cluster:
    """The cluster from a file, the devices that were named, or this machine. devices: in place of
    `args.devices`."""
    count = devices or args.devices
    if args.cluster is not None:
        return read_cluster(args.cluster, count)
    if args.device is not None:
        return named_cluster(args.device, count, args.memory)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    here = cluster_here(count, torch.device(kind))
    if args.memory is None:
        return here
    return replace(here, device=replace(here.device, memory=args.memory))


class Progress:
    """One terminal line, overwritten: candidates, the best so far, seconds."""

    def __init__(self, interval: float = 0.1) -> None:
        """interval: seconds between two updates of the line."""
        self._interval = interval
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
        elif now - self._last >= self._interval:
            self._last = now
            best = record.incumbent()
            said = f"{record.done:,} of {total:,} candidates"
            if best is not None and best.prediction is not None:
                said += f", best {seconds_text(best.prediction.seconds)}"
            line = f"\r\x1b[Kgraphaccel: {'plan':<10} {said:<60} {now - self._start:6.1f} s"
            print(line, end="", file=sys.stderr, flush=True)
