"""Compiles a model and a batch into runnable programs: capture → planner → passes.

`api.optimize` and `graphaccel plan` both use this module; the runtime gets the results, and a way
to request another program when a batch of another shape comes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.batch_dims import assignments
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.capture_context import no_collections
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import Model, tensor_bytes
from graphaccel.compiler.ort_regions import Regions
from graphaccel.compiler.probe_routing import TriedChoices, fullest_memory, share_of, tried_choices
from graphaccel.compiler.profile_graph import localised
from graphaccel.compiler.programs import Target, build, placed_programs
from graphaccel.errors import BatchNotDivisible, GraphAccelError, NoLoss, PlanMismatch
from graphaccel.errors.messages import format_bytes
from graphaccel.ir.program import Sharded, StepProgram
from graphaccel.kernels.registry import enabled, without_tensor_axis
from graphaccel.passes.microbatch.exact_microbatch import mixes_examples, split_limits
from graphaccel.passes.pipeline import placed_fusions, prepared
from graphaccel.passes.place_ort import Tools
from graphaccel.planner.cluster.cluster import Cluster, cluster_name
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.memory.exact_memory import UNEVEN, Resident, Sample, rank_curve, rank_memory
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Chosen, StageMemory
from graphaccel.planner.profile.layout_profiles import Layouts, LocalGraph, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.rate_correction import model_key, precision_name, refined
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import search
from graphaccel.planner.search.validate_plan import check_fusions, check_given
from graphaccel.progress import progress
from graphaccel.report.format import folded
from graphaccel.report.fused import chunk_notes, fusion_notes
from graphaccel.report.rules import every_rule, missing, missing_note, priced_rules
from graphaccel.runtime.cuda_graphs import fixed_bytes
from graphaccel.runtime.cuda_graphs import notes as graph_notes
from graphaccel.runtime.inductor.partition import notes as compile_notes
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Schedule, with_head
from graphaccel.schedule.table import build as build_schedule
from graphaccel.sharding.rules.propagate import NO_RULE


def schedule_of(plan: Plan, program: StepProgram) -> Schedule:
    """The plan's pipeline schedule with its messages."""
    table = build_schedule(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    if program.headed:
        table = with_head(table, len(program.stages) - 1)
    return with_communication(table, program.forward_edges, program.backward_edges)


def forward_schedule(plan: Plan, program: StepProgram) -> Schedule:
    """The schedule of an evaluation: forwards only, one microbatch."""
    table = build_schedule(
        "gpipe" if plan.interleave == 1 else "interleaved", plan.pipeline, plan.interleave, 1
    )
    ordered = tuple(
        tuple(sorted((a for a in rank if a.kind == "forward"), key=lambda a: a.stage))
        for rank in table
    )
    return with_communication(ordered, program.forward_edges, frozenset())


class Compiler:
    """Captures, plans and rewrites one model; caches captures by batch shape.

    captures: may be shared by the compilers of equal models.
    """

    def __init__(
        self, model: Model, cluster: Cluster, pins: Mapping[str, Any], plan: Plan | None = None
    ) -> None:
        self.model, self.cluster, self.pins, self.plan = model, cluster, dict(pins), plan
        self.path = "plan"
        self.resting: Mapping[str, tuple[Sharded, ...]] | None = None
        self.captures = Captures(model)
        parts = plan.data * plan.microbatches if plan is not None else cluster.count
        if parts > 1 or (self.pins.get("microbatches") or 1) > 1:
            self.captures.splits = lambda step: not mixes_examples(step)
        self._layouts: dict[str, Layouts] = {}
        self.regions = Regions()
        self._choices: dict[Any, TriedChoices] = {}

    def with_pins(self, pins: Mapping[str, Any]) -> Compiler:
        """A compiler with these pins, which shares the captures."""
        other = Compiler(self.model, self.cluster, pins)
        other.captures = self.captures
        return other

    def capture(self, batch: Batch) -> tuple[StepGraph, dict]:
        """The training step for a batch, and the values of its symbolic sizes for that batch."""
        return self.captures.of(batch)

    def of_size(self, batch: Batch, size: int) -> Batch:
        """The batch at another size along its batch dims: the most likely dims, if a capture at
        that size succeeds, else those that a capture of the batch as it is finds."""
        dims = self.captures.given_dims(batch)
        if dims is not None:
            return resized(batch, dims, size)
        dims = assignments(batch)[0]
        try:
            agreed = self.capture(resized(batch, dims, size))[0].batch_dims == dims
        except GraphAccelError:  # the capture below raises the reason, if it is not the size
            agreed = False
        if not agreed:
            apart = Compiler(self.model, self.cluster, self.pins)
            dims = apart.capture(batch)[0].batch_dims
        return resized(batch, dims, size)

    def digest(self, batch: Batch) -> str:
        """Digest of what a plan depends on that may differ between two ranks."""
        step, sizes = self.capture(batch)
        told = (step.fingerprint, sorted(map(str, sizes.items())), sorted(self.pins.items()))
        state = (self.model.optimizer_bytes, self.cluster, self.plan)
        return hashlib.sha256(repr((told, state)).encode()).hexdigest()

    def adopt(self, plan: Plan) -> None:
        """Use another rank's plan, which it chose for this step."""
        self.plan = plan

    def choose(
        self, batch: Batch, record: Record | None = None
    ) -> tuple[StepGraph, Plan, StepProgram]:
        """Capture and plan. The plan carries predictions made on the programs that will run.

        record: collects what the search does.

        Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), PlanMismatch (GA204),
        BatchNotDivisible (GA206), SplitRefused (GA207), NoLoss (GA103).
        """
        with no_collections():
            return self._choose(batch, record)

    def _choose(self, batch: Batch, record: Record | None) -> tuple[StepGraph, Plan, StepProgram]:
        step, sizes = self.capture(batch)
        self._refine_rates(step, sizes)
        if self.plan is not None:
            self._check_plan(step, sizes)
            plan, program = self.refine(step, self.plan, batch, sizes)
            self.resting = program.resting
            return step, plan, program
        start = time.perf_counter()
        built: dict[Plan, StepProgram] = {}

        layouts = self.layouts(step, sizes)
        planned = layouts.whole.step

        def refine(plan: Plan) -> Plan:
            plan = replace(plan, fusions=self._fusions(plan), graph=step.fingerprint)
            refined, program = self.refine(step, plan, batch, sizes)
            built[refined.decided()] = program
            return refined

        limits = split_limits(planned)
        self._refuse_missing(planned, limits)
        plan = search(
            planned,
            self.cluster,
            pins=self.pins,
            optimizer_bytes=int(4 * self.model.optimizer_bytes),
            refine=refine,
            limits=limits,
            batch=sizes.get(BATCH, step.batch_size),
            record=record,
            shardable=self.model.shardable,
            profiles=layouts,
            stepping=self._stepping(),
        )
        program = built.get(plan.decided(notes=()))
        if program is None:
            plan, program = self.refine(step, plan, batch, sizes)
        notes = (*plan.notes, *_kept_whole(program), *self._without_rules(planned, plan))
        notes += (*self._whole_over_tensor(program, plan), *self._assumed(step, plan))
        notes += self._stand_in()
        if plan.fusions:
            notes += fusion_notes(placed_fusions(step, plan), self.cluster.device.type)
            notes += chunk_notes(layouts.of(plan), plan, self.cluster)
        if plan.compile != "off":
            notes += compile_notes(program, layers=not plan.min_cut)
        notes += graph_notes(program) if plan.cuda_graphs else ()
        plan = replace(plan, notes=notes)
        self.plan, self.resting = plan, program.resting
        progress("plan", plan.name, time.perf_counter() - start)
        return step, plan, program

    def _refine_rates(self, step: StepGraph, sizes: Mapping) -> None:
        """Correct rates by measured steps of this model (`planner.profile.rate_correction`)."""
        if self.cluster.steps:
            pinned, given = self.pins.get("precision") or "fp32", self.plan
            name = pinned if given is None else precision_name(given.precision)
            self.cluster = refined(self.cluster, model_key(self.layouts(step, sizes).whole), name)

    def _refuse_missing(self, step: StepGraph, limits: Limits) -> None:
        """Raises MissingRule (GA301) where a pin splits the batch at an op without a rule."""
        asked = any((self.pins.get(name) or 1) > 1 for name in ("data", "microbatches"))
        if asked and any(x and NO_RULE in x.reason for x in (limits.microbatches, limits.data)):
            error = missing(priced_rules(step, self.cluster.device))
            if error is not None:
                raise error

    def _without_rules(self, step: StepGraph, plan: Plan) -> tuple[str, ...]:
        """Report lines: what missing rules cost, where work is split over more than the batch."""
        if plan.model_parallel_size == 1 or every_rule(step):
            return ()
        return missing_note(priced_rules(step, self.cluster.device))

    def layouts(self, step: StepGraph, sizes: Mapping | None = None) -> Layouts:
        """Profiles of a captured step, unsharded and as its shards run it. sizes: of the batch."""
        if step.fingerprint not in self._layouts:

            def local(plan: Plan) -> LocalGraph:
                plan = replace(
                    plan, fusions=self._fusions(plan), rates=rates_of(self.cluster, plan)
                )
                made = prepared(step, plan)
                return (
                    LocalGraph(made)
                    if plan.model_parallel_size == 1
                    else localised(made, plan, sizes)
                )

            base = Plan(1, outputs=self.pins.get("outputs") or "loss")
            whole = prepared(step, replace(base, fusions=self._fusions(base)))
            self._layouts[step.fingerprint] = Layouts(Profile(whole), local)
        return self._layouts[step.fingerprint]

    def _fusions(self, plan: Plan) -> tuple[str, ...]:
        """Off unless pinned: their gain has not been measured yet (docs/fusions.md)."""
        names = enabled(
            self.pins.get("fusions") or "off",
            self.cluster.device.type,
            compiled=(self.pins.get("compile") or "off") != "off",
        )
        return without_tensor_axis(names) if plan.tensor > 1 else names

    def _stepping(self) -> OptimizerMemory:
        """Memory that the optimizer's step allocates; our fused step allocates none."""
        ours = enabled(self.pins.get("fusions") or "off", self.cluster.device.type)
        return NOTHING if ours else self.model.stepping

    def _whole_over_tensor(self, program: StepProgram, plan: Plan) -> tuple[str, ...]:
        """Weights that were to be sharded over the tensor axis and are not, if they are a
        twentieth."""
        if plan.tensor == 1:
            return ()
        weights = {n: p for n, p in self.model.module.named_parameters() if p.dim() > 1}
        whole = [n for n in weights if n not in program.resting]
        size = sum(tensor_bytes(weights[n]) for n in whole)
        if 20 * size < sum(map(tensor_bytes, weights.values())):
            return ()
        return (
            f"whole on each of the tensor axis, {format_bytes(size)}: {folded(whole)}: it does not "
            "divide their heads or dims, or sending would cost more",
        )

    def refine(
        self, step: StepGraph, plan: Plan, batch: Batch, sizes: Mapping
    ) -> tuple[Plan, StepProgram]:
        """Build the programs of a plan and predict their memory exactly."""
        given = plan is self.plan
        if not plan.rates:
            plan = replace(plan, rates=rates_of(self.cluster, plan))
        target = Target(sizes, ort=self._tools(plan))
        plan, program = placed_programs(step, plan, target, self.path)
        schedule = schedule_of(plan, program)
        resident = self._resident(batch, plan, program, schedule)
        chosen = self._routed(step, plan, batch, sizes, given)
        memory = []
        for rank in range(plan.pipeline):
            exact, _ = fullest_memory(chosen, program, schedule, rank, resident[rank])
            tensors = exact.peak
            if chosen:
                alike = rank_memory(program, schedule, rank, resident[rank])
                exact = replace(exact, chosen=tensors - alike.peak)
            if plan.expert > 1:
                more = rank_memory(program, schedule, rank, resident[rank], chosen=lambda _: UNEVEN)
                exact = replace(exact, uneven=max(0, more.peak - tensors))
            margin = self.cluster.context_bytes + int(self.cluster.fragmentation * tensors)
            memory.append(replace(exact, other=margin, peak=tensors + margin))
        prediction = plan.prediction
        if prediction is not None:
            prediction = replace(prediction, memory=tuple(memory), ort=program.ort, chosen=chosen)
        return replace(plan, prediction=prediction), program

    def _routed(
        self, step: StepGraph, plan: Plan, batch: Batch, sizes: Mapping, given: bool
    ) -> tuple[Chosen, ...]:
        """How the batch's tokens choose experts, where known."""
        if plan.expert == 1:
            return ()
        if given:  # another rank's plan, or one from a file
            return () if plan.prediction is None else plan.prediction.chosen
        key = step.fingerprint, plan.data, plan.microbatches, plan.expert
        if key not in self._choices:
            self._choices[key] = tried_choices(step, self.model.module, batch, plan, sizes)
        return self._choices[key].chosen

    def _assumed(self, step: StepGraph, plan: Plan) -> tuple[str, ...]:
        """Why an even choice of experts is assumed, if it is."""
        found = self._choices.get((step.fingerprint, plan.data, plan.microbatches, plan.expert))
        if found is None or not found.unknown:
            return ()
        return (f"an even choice of experts is assumed: {found.unknown}",)

    def _stand_in(self) -> tuple[str, ...]:
        """Which device's rates are planned with, where the detected device has none of its own."""
        device = self.cluster.device
        if not device.stands_for:
            return ()
        return (
            f"the rates of {device.stands_for} are taken to be those of {device.name} by its "
            f"{device.processors} processors; `graphaccel calibrate` measures them",
        )

    def device_memory(
        self, plan: Plan, program: StepProgram, batch: Batch, rank: int, data: int, expert: int
    ) -> StageMemory | None:
        """The predicted memory of one device of a pipeline rank, by its coordinates on the other
        axes; parameters must still be full. None without a prediction."""
        if plan.prediction is None:
            return None
        memory = plan.prediction.memory[rank]
        if not plan.prediction.chosen:
            return memory
        schedule = schedule_of(plan, program)
        share = share_of(plan.prediction.chosen, data, expert)
        resident = self._resident(batch, plan, program, schedule)
        return rank_memory(program, schedule, rank, resident[rank], memory.other, share)

    def curves(
        self,
        plan: Plan,
        program: StepProgram,
        batch: Batch,
        spans: Mapping[tuple[str, int, int], tuple[float, float]],
    ) -> tuple[tuple[Sample, ...], ...]:
        """Bytes on each pipeline rank over a step (`planner.memory.exact_memory.rank_curve`)."""
        schedule = schedule_of(plan, program)
        resident = self._resident(batch, plan, program, schedule)
        assert plan.prediction is not None
        chosen = plan.prediction.chosen
        return tuple(
            rank_curve(
                program, schedule, m.rank, resident[m.rank], spans, m.other,
                chosen=fullest_memory(chosen, program, schedule, m.rank, resident[m.rank])[1],
            )
            for m in plan.prediction.memory
        )  # fmt: skip

    def _resident(
        self, batch: Batch, plan: Plan, program: StepProgram, schedule: Schedule
    ) -> list[Resident]:
        """What each pipeline rank holds for the whole step."""
        exchanged = self.cluster.device.name == "cpu"
        resident = replace(self.model.resident(batch, plan, program), exchanged=exchanged)
        if not plan.cuda_graphs:
            return [resident] * plan.pipeline
        fixed = (fixed_bytes(program, schedule[rank]) for rank in range(plan.pipeline))
        return [replace(resident, batch=2 * resident.batch + more) for more in fixed]

    def compile(
        self,
        batch: Batch,
        plan: Plan,
        homes: Mapping[str, tuple[int, ...]],
        groups: tuple[tuple[str, ...], ...],
    ) -> tuple[StepGraph, StepProgram]:
        """The training program for a batch of another shape under an already running plan."""
        step, sizes = self.capture(batch)
        size = sizes.get(BATCH, step.batch_size)
        parts = plan.data * plan.microbatches
        if size % parts:
            raise BatchNotDivisible(
                batch=size,
                microbatches=plan.microbatches,
                data=plan.data,
                allowed=tuple(n for n in range(1, size + 1) if size % (n * plan.data) == 0),
            )
        _check_loss(step, plan)
        outputs = plan.outputs if step.has_loss else "all"
        same = step.fingerprint == plan.graph
        own = plan.decided(batch=size, outputs=outputs, axis_placements=())
        return step, build(
            step,
            own,
            sizes=sizes,
            homes=None if same else homes,
            resting=self.resting,
            groups=groups,
            ort=self._tools(plan),
        )

    def compile_evaluation(
        self,
        batch: Batch,
        plan: Plan,
        homes: Mapping[str, tuple[int, ...]],
        training: bool,
        groups: tuple[tuple[str, ...], ...] = (),
    ) -> tuple[StepGraph, StepProgram]:
        """A forward-only program in the model's current mode; data ranks get the whole batch."""
        # A graph sharded over more than data is split by its symbolic sizes.
        fixed = plan.model_parallel_size == 1
        step, sizes = self.captures.of(batch, training=training, fixed=fixed)
        size = sizes.get(BATCH, step.batch_size)
        alone = plan.decided(
            data=1, microbatches=1, recompute=(), outputs="all", batch=size, axis_placements=()
        )
        return step, build(
            step,
            alone,
            sizes=sizes,
            homes=homes,
            gradients=False,
            resting=self.resting,
            groups=groups,
            ranks=plan.shards,
            ort=self._tools(alone),
        )

    def _tools(self, plan: Plan) -> Tools | None:
        """What placing ONNX Runtime regions under a plan needs. Raises as `Regions.tools`."""
        return self.regions.tools(plan, self.cluster, self.plan)

    def _check_plan(self, step: StepGraph, sizes: Mapping) -> None:
        assert self.plan is not None
        here = {
            "model": step.fingerprint,
            "cluster": cluster_name(self.cluster),
            "devices": str(self.cluster.count),
            "global batch": str(sizes.get(BATCH, step.batch_size)),
        }
        said = {
            "model": self.plan.graph,
            "cluster": self.plan.cluster,
            "devices": str(self.plan.devices),
            "global batch": str(self.plan.batch),
        }
        different = tuple((k, said[k], here[k]) for k in here if said[k] != here[k])
        if different:
            raise PlanMismatch(path=self.path, differences=different)
        check_fusions(self.plan, self.path, self.cluster.device.type)
        check_given(self.plan, self.path, prepared(step, self.plan))


def _check_loss(step: StepGraph, plan: Plan) -> None:
    """Raises NoLoss (GA103) for a plan that needs the loss inside the graph."""
    for name in ("pipeline", "interleave", "microbatches"):
        if not step.has_loss and getattr(plan, name) > 1:
            raise NoLoss(asked=f"{name}={getattr(plan, name)}")


def _kept_whole(program: StepProgram) -> tuple[str, ...]:
    """Parameters that ZeRO leaves replicated, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in program.unsharded.items():
        reasons.setdefault(reason, []).append(name)
    return tuple(f"kept whole: {', '.join(names)}: {why}" for why, names in reasons.items())
