"""The step of a published run, predicted as `graphaccel plan` does it for any model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.validation.experts import NOTHING_STARTED, Started, works
from benchmarks.validation.experts import as_theirs as experts_as_theirs
from benchmarks.validation.memory import STATE_BYTES, as_theirs, kept_share
from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.models import model_of, placements
from benchmarks.validation.rows import TENSOR_LINK, Run
from benchmarks.validation.systems import STARTED_LAUNCH
from benchmarks.validation.traced import Segment, as_traced
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model
from graphaccel.errors import InfeasiblePlan
from graphaccel.planner.cluster.catalogue import by_power, cluster
from graphaccel.planner.cluster.cluster import GIB, Cluster, Collective, Device, Link
from graphaccel.planner.cluster.communication import (
    INTERFERENCE,
    all_gather_seconds,
    exposed_seconds,
)
from graphaccel.planner.estimate.estimated_memory import gathered_sizes
from graphaccel.planner.estimate.stage_costs import held_parameters
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.profile.cost import Sizes, node_work
from graphaccel.planner.profile.efficiency import Work, computing, seconds_of
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.search import Conditions, search

_ENDLESS = 2**60
_TRIES = 4  # of choosing what a row does not say, each with less memory
_PAPER = {"h100-80gb": 3.35}  # TB/s of memory, of devices that a system has with another
# Operations are no decision of ours: of all that is made again, those that are kept come off.
_RECOMPUTE = {"": "none", "none": "none", "some": "some", "all": "all", "operations": "all"}


@dataclass(frozen=True)
class Predicted:
    """The run, decided where its row does not; seconds of a step; bytes at the peak of the fullest
    rank, as the source counts them; what is said of memory: "safe", "likely", "risky" or
    "impossible" ("not told": of matmuls in 8 bits); what it was predicted on, in which pieces if
    its system traced such, and what its process starts one by one."""

    run: Run
    seconds: float
    memory: int
    verdict: str
    plan: Plan
    where: Cluster = field(repr=False)
    profile: Profile = field(repr=False)
    pieces: tuple[Segment, ...] = field(default=(), repr=False)
    started: Started = field(default=NOTHING_STARTED, repr=False)

    def works(self) -> list[tuple[Work, float]]:
        """What a microbatch asks of a device, all stages together, and how often."""
        return works(self.run, self.profile, self.plan)


class _Redrawn(Layouts):
    """Of systems that do all of a block's forward again where they recompute it, drawing random
    numbers and sending; ours does what the backward reads again, and keeps both. recompute_whole:
    what nothing reads is done again too."""

    recompute_whole = True

    def of(self, plan: Plan) -> Profile:
        """The profile of the graph that a device of `plan` runs."""
        profile = super().of(plan)
        profile.storages.kept[:] = False
        profile.recompute_whole = self.recompute_whole
        return profile


class Predictor:
    """Predicts runs; keeps the capture and the layouts of each shape of model."""

    def __init__(self, most: int) -> None:
        """most: devices of the largest run; links are those of that many."""
        self._most = most
        self._layouts: dict[Any, Layouts] = {}
        self._captures: dict[Any, dict[Any, StepGraph]] = {}
        self._found: tuple[Run, Predicted] | None = None

    def predict(self, run: Run) -> Predicted:
        """Raises what planning raises, but for memory: a run that really ran is never refused."""
        alike = replace(run, source="", group="", name="", seconds=0.0, memory=None)
        if self._found is None or self._found[0] != alike:
            self._found = alike, self._new(run)
        found = self._found[1]
        told = replace(
            found.run,
            source=run.source,
            group=run.group,
            name=run.name,
            seconds=run.seconds,
            memory=run.memory,
        )
        return replace(found, run=told)

    def _new(self, run: Run) -> Predicted:
        where = cluster_of(run, run.devices)
        run = self._decided(run, where)
        found = self._predicted(run, where)
        if run.recompute or found.verdict != "impossible":
            return found
        return self._recomputing(found, where) or found

    def _recomputing(self, whole: Predicted, where: Cluster) -> Predicted | None:
        """With what the planner computes again, where the row does not say and keeping all, as in
        `whole`, has no room by our count; None where nothing helps."""
        said = "what is computed again, as memory asks: the planner's choice"
        run = replace(whole.run, recompute="some", assumed=(*whole.run.assumed, said))
        real = real_cluster(run, run.devices)
        assert whole.plan.prediction is not None
        ours = max(m.peak for m in whole.plan.prediction.memory) / whole.memory
        memory = ours * real.device.memory
        for _ in range(_TRIES):
            try:
                less = replace(where, device=replace(where.device, memory=int(memory)))
                found = self._predicted(run, less)
            except InfeasiblePlan:
                return None
            if found.verdict != "impossible":
                return found
            memory -= ours * max(GIB, found.memory - real.tensor_budget)
        return None

    def _predicted(self, run: Run, where: Cluster) -> Predicted:
        """A run that is decided."""
        system = run.system
        plan, profile = self._planned(run, system.fusions, where)
        assert plan.prediction is not None
        kept = kept_share(run, profile, plan, where)
        # A compiler leaves out of what is made again what the backward does not read.
        whole = not (system.compiled and run.recompute == "all")
        timed, profile = self._planned(run, system.fusions + system.timed, where, whole)
        assert timed.prediction is not None
        fullest = max(as_theirs(m, run, kept) for m in plan.prediction.memory)
        real = real_cluster(run, run.devices)
        said = int(fullest * (1 + real.fragmentation)) if run.system.reserved else fullest
        # What matmuls in 8 bits keep for the backward is in 8 bits there, and not counted so here.
        verdict = real.verdict(fullest) if not run.products else "not told"
        timed, started = experts_as_theirs(run, profile, timed, where, STARTED_LAUNCH)
        pieces: tuple[Segment, ...] = ()
        if system.traced:
            fusions = system.fusions + system.timed
            ahead = replace(where, device=replace(where.device, launch_seconds=0.0))
            alone, profile = self._planned(run, fusions, ahead)
            timed, pieces = as_traced(run, profile, alone, timed, where.device)
        assert timed.prediction is not None
        seconds = timed.prediction.seconds + _waited(run, profile, timed, where)
        if run.recompute == "operations":
            spared = timed.microbatches * _kept_seconds(profile, timed, where)
            parts = timed.prediction
            parts = replace(parts, seconds=parts.seconds - spared, compute=parts.compute - spared)
            timed, seconds = replace(timed, prediction=parts), seconds - spared
        return Predicted(run, seconds, said, verdict, timed, where, profile, pieces, started)

    def _decided(self, run: Run, where: Cluster) -> Run:
        """With the microbatches and stages that the planner chooses, where the row has none: such
        as fit as their system counts memory."""
        if run.microbatch and run.interleave:
            return run
        real = real_cluster(run, run.devices)
        memory, budget = real.device.memory, real.tensor_budget
        for _ in range(_TRIES):
            device = replace(where.device, memory=memory)
            try:
                found, over = self._chosen(run, replace(where, device=device), budget)
            except InfeasiblePlan:  # by our count; it ran
                found, _ = self._chosen(run, where, budget, ", none of which fits")
                break
            if over <= 0:
                break
            memory -= over
        return found

    def _chosen(self, run: Run, where: Cluster, budget: int, fits: str = "") -> tuple[Run, int]:
        """(the run as the planner decides it, bytes by which it misses the budget)."""
        plan, profile = self._planned(run, run.system.fusions, where)
        assert plan.prediction is not None
        size = plan.microbatch_size // run.expert
        said = f"{plan.microbatches} microbatches of {size}"
        said += f", {plan.interleave} stages a rank" if run.interleave == 0 else ""
        decided = replace(
            run,
            microbatch=size,
            interleave=plan.interleave,
            assumed=(*run.assumed, f"{said}: the planner's choice{fits}"),
        )
        kept = kept_share(decided, profile, plan, where)
        fullest = max(as_theirs(m, decided, kept) for m in plan.prediction.memory)
        return decided, fullest - budget

    def _planned(
        self, run: Run, fusions: tuple[str, ...], where: Cluster, recompute_whole: bool = True
    ) -> tuple[Plan, Profile]:
        """The run's plan with such kernels, and what a device of it runs. recompute_whole: of
        blocks that are recomputed also what nothing reads."""
        captured = self.captured(run, fusions, recompute_whole)
        plan = search(
            captured.whole.step,
            where,
            pins=_pins(run, captured.whole),
            optimizer_bytes=STATE_BYTES,
            profiles=captured,
            conditions=Conditions(batch=run.batch),
        )
        return plan, captured.of(plan)

    def captured(
        self,
        run: Run,
        fusions: tuple[str, ...],
        recompute_whole: bool = True,
        *,
        other_meshes: bool = False,
    ) -> Layouts:
        """The layouts of the run's model on devices of this kind that reach one another so.
        other_meshes: as of `cluster_of`."""
        where = cluster_of(run, self._most, other_meshes=other_meshes)
        shape = run.shape, run.device
        key = shape, where.links, fusions, recompute_whole
        if (known := self._layouts.get(key)) is None:
            module, batch = model_of(run)
            pins = {"fusions": fusions or "off", "compile": "off"}
            compiler = Compiler(Model(module, None, STATE_BYTES / 4), where, pins)
            # On other devices it is the same.
            self._captures = {run.shape: self._captures.get(run.shape, {})}
            compiler.captures.steps = self._captures[run.shape]
            step, sizes = compiler.capture(batch)
            made = compiler.layouts(step, {**sizes, BATCH: 2})
            known = _Redrawn(made.whole, made.shard_graph)
            known.recompute_whole = recompute_whole
            same = {key: made for key, made in self._layouts.items() if key[0] == shape}
            self._layouts = {**same, key: known}  # runs come by shape
        return known


def real_cluster(run: Run, devices: int) -> Cluster:
    """Of the catalogue, with the memory of the run's system where that is another. Jobs on racks of
    72 take the same number of nodes of each, and powers of two of devices: 64."""
    where = cluster(run.device, devices)
    if run.system.device is not None:
        gibibytes, terabytes, power = run.system.device
        copied = where.device.memory_bandwidth * terabytes / _PAPER[run.device]
        rates = {
            name: rate * by_power(power, name) for name, rate in where.device.peak_flops.items()
        }
        device = replace(
            where.device,
            memory=int(gibibytes * GIB),
            memory_bandwidth=copied,
            peak_flops=rates,
        )
        where = replace(where, device=device)
    inner, *outer = where.links
    if outer and inner.size == 72:
        nodes = -(-devices // 64)
        where = replace(where, links=(replace(inner, size=64), replace(outer[0], size=64 * nodes)))
    return where


def cluster_of(run: Run, devices: int, *, other_meshes: bool = False) -> Cluster:
    """Of devices that hold everything and otherwise are as the run's system made use of them.

    other_meshes: for other sizes of the tensor axis too, at the rates that the run's has."""
    where, system = real_cluster(run, devices), run.system
    device = replace(
        where.device,
        memory=_ENDLESS,
        launch_seconds=system.launch_seconds or where.device.launch_seconds,
    )
    older = run.device.startswith(("a100", "v100"))
    attention = system.attention if older else system.attention_hopper
    if run.context > 1:  # rows of a causal mask are spread evenly there; ours are under a mask
        attention *= 2
    device = replace(
        device,
        attention=attention * device.attention,
        attention_backward=attention * device.attention_backward,
        product_8_bits=system.scaled * device.product_8_bits,
    )
    if system.router_rounds:  # no other product is in float32 there
        rates = {**device.peak_flops, "float32": device.peak_flops[run.precision]}
        device = replace(device, peak_flops=rates)
    device = computing(device, Precision(run.precision, matmul=run.products))
    inner, *outer = where.links
    if system.network_gigabits:
        outer = [replace(x, bandwidth=system.network_gigabits * 1e9 / 8 * 0.95) for x in outer]
    within = _tensor_links(run, device, inner)
    if other_meshes:
        within = (replace(within[0], name=inner.name, size=inner.size),)
    return replace(where, device=device, links=(*within, *outer))


def _tensor_links(run: Run, device: Device, inner: Link) -> tuple[Link, ...]:
    """The levels within a node, where devices of the tensor axis reach one another at rates of
    their own: in pieces beside products all but one piece hides, as over data."""
    system = run.system
    exposed = exposed_seconds(device, 1.0, 1 / run.tensor, 1.0) if system.split else 1.0
    hop, rate = inner.latency_seconds * exposed, inner.bandwidth / exposed
    gathers = Collective("all-gather", hop, rate * 16 / run.gathered_bits)
    if system.gathers_whole:
        gathers = Collective("all-gather", inner.latency_seconds, inner.bandwidth)
    own = replace(inner, latency_seconds=hop, bandwidth=rate, measured=(gathers,))
    if run.tensor == 1:
        return (inner,)
    if inner.size % run.tensor or inner.size == run.tensor:
        return (own,)
    return replace(own, name=TENSOR_LINK, size=run.tensor), inner


def _pins(run: Run, profile: Profile) -> dict[str, object]:
    pins: dict[str, object] = {
        "data": run.data // run.expert,
        "pipeline": run.pipeline,
        "tensor": run.tensor,
        "context": run.context,
        "expert": run.expert,
        "recompute": run.system.recompute or _RECOMPUTE[run.recompute],
        **_zero(run),
        "sequence": run.sequence_parallel,
        "offload": "none",
    }
    if run.system.experts_again:
        layers = [n for n in range(run.layers) if MIXTURES[run.kind].has_experts(n)]
        pins["recompute"] = tuple(profile.block_names[n] for n in layers)
    if run.tensor > 1 or run.context > 1 or run.expert > 1:
        pins["placements"] = placements(profile, run.tensor, run.expert)
    if run.context > 1:
        pins["context_by"] = "sequence"
    if run.microbatch:
        pins["microbatches"] = run.microbatches
    if run.pipeline > 1:
        if run.interleave:
            pins["interleave"] = run.interleave
            pins["schedule"] = "1f1b" if run.interleave == 1 else "interleaved"
            if (cuts := _cuts(run, profile)) is not None:
                pins["cuts"] = cuts
        if run.tensor > 1:
            pins["scatter_sends"] = True  # Megatron-LM does so unless told otherwise
    if not run.system.overlaps:
        pins["bucket_bytes"] = _ENDLESS  # one all-reduce, after the last backward
    return pins


def _zero(run: Run) -> dict[str, object]:
    """What is sharded over data. FSDP's SHARD_GRAD_OP gathers a block's parameters once in each
    microbatch, and sums after every one."""
    if run.data == run.expert:
        return {"zero": 0}
    if run.zero == 3 and run.system.gathers_once:
        return {"zero": 3, "reshard_after_forward": "once_per_step", "accumulation": "whole"}
    if run.zero >= 2:
        return {
            "zero": 3,
            "reshard_after_forward": "always" if run.zero == 3 else "never",
            "accumulation": "shards",
        }
    if run.zero and run.system.gathers_beside:
        return {"zero": 3, "reshard_after_forward": "once_per_step"}
    return {"zero": run.zero}


def _waited(run: Run, profile: Profile, plan: Plan, where: Cluster) -> float:
    """Seconds a step waits longer for parameters that are gathered for the backward, where no
    computing runs beside it."""
    if run.system.prefetches or plan.reshard_after_forward != "always" or plan.zero < 3:
        return 0.0
    span = 0, len(profile)
    sizes = gathered_sizes(profile, held_parameters(profile, [span]), plan)
    each = [all_gather_seconds(where, size, plan.data, plan.model_parallel_size) for size in sizes]
    return plan.microbatches * (1 - INTERFERENCE) * (sum(each) - max(each, default=0.0))


def _cuts(run: Run, profile: Profile) -> tuple[str, ...] | None:
    """Where stages of whole layers end: of equally many, or with one less in the first and the last
    (Llama 3, arXiv 2407.21783, section 3.3.2); None where neither is possible."""
    stages = run.pipeline * run.interleave
    for fewer in (0, 1):
        if (run.layers + 2 * fewer) % stages == 0:
            each = (run.layers + 2 * fewer) // stages
            ends = [each * (stage + 1) - fewer for stage in range(stages - 1)]
            starts = [int((profile.block_at == b).argmax()) for b in range(run.layers)]
            behind = profile.block_at[starts[-1] :] != run.layers - 1
            starts.append(starts[-1] + int(behind.argmax()))
            return tuple(profile.names[starts[end] - 1] for end in ends)
    return None


def _kept_seconds(profile: Profile, plan: Plan, where: Cluster) -> float:
    """Of a microbatch's forward, what `Run.recompute` "operations" does not make again."""
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    kinds, first = profile.node_kinds
    works = [node_work(node, sizes) for node in first]
    blocks, total = profile.block_at[profile.node_position], 0.0
    for number in range(len(profile.block_names)):
        products = 0
        for kind in kinds[(blocks == number) & profile.node_forward].tolist():
            work = works[kind]
            products += work.kind == "product"
            if work.kind == "attention" or (work.kind == "product" and products % 2):
                total += seconds_of(work, where.device)
    return total
