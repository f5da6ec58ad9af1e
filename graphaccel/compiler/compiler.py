"""Compiles a model and a batch into runnable programs: capture → planner → passes.

`api.optimize` and `graphaccel plan` both use this module; the runtime gets the results, and a way
to request another program when a batch of another shape comes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.batch_dims import assignments
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.compiler.auto_precision import AUTO, best_precision
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.given_plan import check_batch, check_given_plan
from graphaccel.compiler.model import Model
from graphaccel.compiler.ort_regions import Regions
from graphaccel.compiler.plan_notes import program_notes
from graphaccel.compiler.probe_routing import TriedChoices, tried_choices
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.compiler.program_memory import ProgramMemory
from graphaccel.compiler.programs import Target, build, placed_programs
from graphaccel.errors import GraphAccelError
from graphaccel.garbage import no_collections
from graphaccel.ir.program import StepProgram
from graphaccel.kernels.registry import without_tensor_axis
from graphaccel.passes.context import Fixed
from graphaccel.passes.microbatch.exact_microbatch import mixes_examples, split_limits
from graphaccel.passes.pipeline import prepared
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.plan.base_plan import fusions_for, makes_kernels
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import Chosen
from graphaccel.planner.profile.layout_profiles import Layouts, LocalGraph, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.rate_correction import model_key, precision_name, refined
from graphaccel.planner.search.record import Record
from graphaccel.planner.search.search import Conditions, search
from graphaccel.progress import progress, running
from graphaccel.report.rules import missing, priced_rules
from graphaccel.sharding.rules.batch_placement import NO_RULE


@dataclass(frozen=True)
class Planned:
    """A captured step, the plan that was chosen for it, and the programs of the plan.

    cluster: what was planned for, with its rates corrected by measured steps of the model.
    """

    step: StepGraph
    plan: Plan
    program: StepProgram
    cluster: Cluster


class Compiler:
    """Captures, plans and rewrites one model.

    Its settings do not change; what it caches (captures, profiles, sessions of ONNX Runtime, how
    tokens choose experts) is for the model, and gives the same results without.

    given: the plan to run, instead of choosing one. path: what errors call that plan. captures: may
    be shared by the compilers of equal models.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        pins: Mapping[str, Any],
        given: Plan | None = None,
        path: str = "plan",
    ) -> None:
        self.model, self.cluster, self.pins = model, cluster, dict(pins)
        self.given, self.path = given, path
        self.captures = Captures(model)
        parts = given.data * given.microbatches if given is not None else cluster.count
        if parts > 1 or (self.pins.get("microbatches") or 1) > 1:
            self.captures.splits = lambda step: not mixes_examples(step)
        self.regions = Regions()
        self._layouts: dict[str, Layouts] = {}
        self._choices: dict[Any, TriedChoices] = {}

    def with_pins(self, pins: Mapping[str, Any]) -> Compiler:
        """A compiler with these pins, which shares the captures."""
        other = Compiler(self.model, self.cluster, pins)
        other.captures = self.captures
        return other

    def on(self, cluster: Cluster) -> Compiler:
        """A compiler for other hardware. It shares the captures, unless only one of the two looks
        for a batch dim by which the step can be split."""
        other = Compiler(self.model, cluster, self.pins)
        if (other.captures.splits is None) == (self.captures.splits is None):
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
        settings = (sorted(self.pins.items()), self.model.optimizer_bytes, self.cluster, self.given)
        asked = (step.fingerprint, sorted(map(str, sizes.items())), settings)
        return hashlib.sha256(repr(asked).encode()).hexdigest()

    # ---- the plan

    def choose(
        self, batch: Batch, record: Record | None = None, given: Plan | None = None
    ) -> Planned:
        """Capture and plan. The plan carries predictions made on the programs that will run.

        record: collects what the search does. given: the plan to run, which another rank chose;
        default: the compiler's, or one that is searched.

        Raises: InfeasiblePlan (GA201), BadPin (GA202), TooManyStages (GA203), PlanMismatch (GA204),
        BatchNotDivisible (GA206), SplitRefused (GA207), NoLoss (GA103).
        """
        with no_collections():
            step, sizes = self.capture(batch)
            cluster = self.cluster_for(step, sizes)
            given = given or self.given
            if given is None and self.pins.get("precision") == AUTO:
                return self._in_best_precision(batch, record)
            if given is None:
                return self._search(step, batch, sizes, record)
            check_given_plan(given, self.path, step, sizes, cluster)
            plan, program = self.refine(step, given, batch, sizes, given=given)
            return Planned(step, plan, program, cluster)

    def _in_best_precision(self, batch: Batch, record: Record | None) -> Planned:
        """The fastest of the plans in each precision that the devices run faster."""
        planned_in: dict[str, tuple[Planned, Record]] = {}

        def plan_in(name: str) -> Plan:
            other = self.with_pins({**self.pins, "precision": name})
            if not self.cluster.steps:  # otherwise the rates depend on the precision
                other._layouts = self._layouts
            own = Record(watch=None if record is None else record.watch)
            planned_in[name] = other.choose(batch, own), own
            return planned_in[name][0].plan

        name, note = best_precision(self.cluster.device, plan_in)
        planned, own = planned_in[name]
        if record is not None:
            vars(record).update(vars(own))
        plan = planned.plan
        pinned = tuple(pin for pin in plan.pinned if pin != "precision")
        return replace(planned, plan=replace(plan, pinned=pinned, notes=(note, *plan.notes)))

    def _search(
        self, step: StepGraph, batch: Batch, sizes: Mapping, record: Record | None
    ) -> Planned:
        start = time.perf_counter()
        built: dict[Plan, StepProgram] = {}
        layouts, cluster = self.layouts(step, sizes), self.cluster_for(step, sizes)

        def refine(plan: Plan) -> Plan:
            plan = replace(plan, fusions=self._fusions(plan), graph=step.fingerprint)
            exact, program = self.refine(step, plan, batch, sizes)
            built[exact.decided()] = program
            return exact

        limits = split_limits(layouts.whole.step)
        self._refuse_missing(layouts.whole.step, limits)
        size = sizes.get(BATCH, step.batch_size)
        conditions = Conditions(limits, size, self.model.shardable, self.step_memory())
        with running("plan") if record is None else nullcontext():  # else what records, shows it
            plan = search(
                layouts.whole.step,
                cluster,
                pins=self.pins,
                optimizer_bytes=int(4 * self.model.optimizer_bytes),
                profiles=layouts,
                conditions=conditions,
                refine=refine,
                record=record,
            )
        program = built.get(plan.decided(notes=()))
        if program is None:
            plan, program = self.refine(step, plan, batch, sizes)
        choices = self._choices.get(_choices_key(step, plan))
        notes = program_notes(step, plan, program, self.model, cluster, layouts, choices)
        plan = replace(plan, notes=(*plan.notes, *notes))
        progress("plan", plan_name(plan), time.perf_counter() - start)
        return Planned(step, plan, program, cluster)

    def _refuse_missing(self, step: StepGraph, limits: Limits) -> None:
        """Raises MissingRule (GA301) where a pin splits the batch at an op without a rule."""
        asked = any((self.pins.get(name) or 1) > 1 for name in ("data", "microbatches"))
        if asked and any(x and NO_RULE in x.reason for x in (limits.microbatches, limits.data)):
            error = missing(priced_rules(step, self.cluster.device))
            if error is not None:
                raise error

    def _fusions(self, plan: Plan) -> tuple[str, ...]:
        """The fused ops of a plan that the search chooses."""
        names = self._placed()
        return without_tensor_axis(names) if plan.tensor > 1 else names

    def _placed(self) -> tuple[str, ...]:
        pinned = self._decided("fusions"), self._decided("compile")
        return fusions_for(*pinned, self.cluster.device.type)

    def _decided(self, name: str) -> Any:
        """A decision that graphs are profiled for: that of the plan to run, or else a pin."""
        return self.pins.get(name) if self.given is None else getattr(self.given, name)

    def step_memory(self) -> OptimizerMemory:
        """Memory that the optimizer's step allocates; our fused step allocates none."""
        return NOTHING if self._placed() else self.model.step_memory

    # ---- profiles and rates

    def layouts(self, step: StepGraph, sizes: Mapping | None = None) -> Layouts:
        """Profiles of a captured step, unsharded and as its shards run it. sizes: of the batch."""
        if step.fingerprint not in self._layouts:
            base = Plan(1, outputs=self.pins.get("outputs") or "loss")
            built = prepared(step, replace(base, fusions=self._fusions(base)))
            kernels = makes_kernels(self._decided("compile"), self.cluster.device.type)
            whole = Profile(built, compiled=kernels)
            local = partial(self._local, step, sizes, self._corrected(whole))
            self._layouts[step.fingerprint] = Layouts(whole, local)
        return self._layouts[step.fingerprint]

    def _local(
        self, step: StepGraph, sizes: Mapping | None, cluster: Cluster, plan: Plan
    ) -> LocalGraph:
        """The step as a device of a plan runs it."""
        plan = replace(plan, fusions=self._fusions(plan), rates=rates_of(cluster, plan))
        result = prepared(step, plan)
        return (
            LocalGraph(result)
            if plan.model_parallel_size == 1
            else sharded_graph(result, plan, sizes)
        )

    def cluster_for(self, step: StepGraph, sizes: Mapping | None = None) -> Cluster:
        """The cluster, its rates corrected by measured steps of this model, where it has some."""
        if not self.cluster.steps:
            return self.cluster
        return self._corrected(self.layouts(step, sizes).whole)

    def _corrected(self, whole: Profile) -> Cluster:
        if not self.cluster.steps:
            return self.cluster
        pinned = self.pins.get("precision") or "fp32"
        name = pinned if self.given is None else precision_name(self.given.precision)
        return refined(self.cluster, model_key(whole), name)

    # ---- programs

    def refine(
        self,
        step: StepGraph,
        plan: Plan,
        batch: Batch,
        sizes: Mapping,
        given: Plan | None = None,
    ) -> tuple[Plan, StepProgram]:
        """Build the programs of a plan and predict their memory exactly.

        given: the plan itself, where it was not chosen here: its regions and the experts that its
        tokens choose are kept.
        """
        cluster = self.cluster_for(step, sizes)
        if not plan.rates:
            plan = replace(plan, rates=rates_of(cluster, plan))
        tools = self.regions.tools(plan, cluster, given)
        target = Target(sizes, ort=tools, device=cluster.device.type)
        checked = given is not None and given is not self.given  # another rank's
        plan, program = placed_programs(step, plan, target, self.path, checked=checked)
        chosen = self._routed(step, plan, batch, sizes, given)
        memory = ProgramMemory(self.model, cluster, batch, plan, program).of_ranks(chosen)
        prediction = plan.prediction
        if prediction is not None:
            prediction = replace(prediction, memory=memory, ort=program.ort, chosen=chosen)
        return replace(plan, prediction=prediction), program

    def _routed(
        self, step: StepGraph, plan: Plan, batch: Batch, sizes: Mapping, given: Plan | None
    ) -> tuple[Chosen, ...]:
        """How the batch's tokens choose experts, where known."""
        if plan.expert == 1:
            return ()
        if given is not None:  # another rank's plan, or one from a file
            return () if plan.prediction is None else plan.prediction.chosen
        key = _choices_key(step, plan)
        if key not in self._choices:
            self._choices[key] = tried_choices(step, self.model.module, batch, plan, sizes)
        return self._choices[key].chosen

    def memory(self, planned: Planned, batch: Batch) -> ProgramMemory:
        """The predicted memory of the programs of a plan; parameters must still be full."""
        return ProgramMemory(self.model, planned.cluster, batch, planned.plan, planned.program)

    def compile(
        self, batch: Batch, planned: Planned, stored: Fixed
    ) -> tuple[StepGraph, StepProgram]:
        """The training program for a batch of another shape under an already running plan.

        stored: where and how the running programs hold the parameters.
        """
        step, sizes = self.capture(batch)
        plan, size = planned.plan, sizes.get(BATCH, step.batch_size)
        check_batch(step, plan, size)
        outputs = plan.outputs if step.has_loss else "all"
        same = step.fingerprint == plan.graph
        own = plan.decided(batch=size, outputs=outputs, axis_placements=())
        return step, build(
            step,
            own,
            sizes=sizes,
            homes=None if same else stored.homes,
            parameter_shards=stored.parameter_shards,
            groups=stored.groups,
            ort=self.regions.tools(plan, planned.cluster, plan),
            device=planned.cluster.device.type,
        )

    def compile_evaluation(
        self, batch: Batch, planned: Planned, stored: Fixed, *, training: bool
    ) -> tuple[StepGraph, StepProgram]:
        """A forward-only program in the model's current mode; data ranks get the whole batch.

        stored: as for `compile`.
        """
        plan = planned.plan
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
            homes=stored.homes,
            gradients=False,
            parameter_shards=stored.parameter_shards,
            groups=stored.groups,
            ranks=plan.shards,
            ort=self.regions.tools(alone, planned.cluster, plan),
            device=planned.cluster.device.type,
        )


def _choices_key(step: StepGraph, plan: Plan) -> Any:
    """What the experts that tokens choose depend on."""
    return step.fingerprint, plan.data, plan.microbatches, plan.expert
