"""Predicts the memory of the programs of a plan, on every rank, from the graphs that will run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

from graphaccel.capture.batch import Batch
from graphaccel.compiler.model import Model
from graphaccel.compiler.probe_routing import fullest_memory, share_of
from graphaccel.compiler.schedules import schedule_of
from graphaccel.ir.program import StepProgram
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.stage_costs import repeating
from graphaccel.planner.memory.exact_memory import UNEVEN, Sample, rank_curve, rank_memory
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.base_plan import makes_kernels
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Chosen, StageMemory
from graphaccel.runtime.cuda_graphs import fixed_bytes
from graphaccel.schedule.table import Schedule


@dataclass(frozen=True)
class ProgramMemory:
    """The memory of a plan's programs for a batch; the model's parameters must still be full."""

    model: Model
    cluster: Cluster
    batch: Batch
    plan: Plan
    program: StepProgram

    @cached_property
    def schedule(self) -> Schedule:
        """The table of actions of a training step."""
        return schedule_of(self.plan, self.program)

    @cached_property
    def _few(self) -> tuple[Schedule, ...]:
        """Schedules of few microbatches, of whose memory that of all follows: between warm-up and
        cool-down each group of `pipeline` microbatches adds the same (the losses that stay).
        The whole schedule alone where there are few, or where a schedule holds all of them."""
        plan, program = self.plan, self.program
        few = repeating(plan.pipeline, plan.microbatches)
        longer = few + plan.pipeline
        if plan.schedule == "gpipe" or program.headed or longer >= plan.microbatches:
            return (self.schedule,)
        return tuple(
            schedule_of(replace(plan, microbatches=count), program) for count in (few, longer)
        )

    def _walked(self, memory: Callable[[Schedule], StageMemory]) -> StageMemory:
        """A rank's memory under the whole schedule. memory: under a given one."""
        short, *longer = map(memory, self._few)
        if not longer:
            return short
        few = repeating(self.plan.pipeline, self.plan.microbatches)
        groups = (self.plan.microbatches - few) // self.plan.pipeline
        return _grown(short, longer[0], groups)

    @cached_property
    def resident(self) -> Sequence[Resident]:
        """What each pipeline rank holds for the whole step."""
        exchanged = self.cluster.device.name == "cpu"
        resident = self.model.resident(self.batch, self.plan, self.program)
        kernels = makes_kernels(self.plan.compile, self.cluster.device.type) and self.plan.min_cut
        resident = replace(resident, exchanged=exchanged, kernels=kernels)
        if not self.plan.cuda_graphs:
            return [resident] * self.plan.pipeline
        fixed = (fixed_bytes(self.program, self.schedule[r]) for r in range(self.plan.pipeline))
        return [replace(resident, batch=2 * resident.batch + more) for more in fixed]

    def of_ranks(self, chosen: tuple[Chosen, ...]) -> tuple[StageMemory, ...]:
        """The memory of the fullest device of each pipeline rank. chosen: how the batch's tokens
        choose experts, where that is known."""
        return tuple(self._of_rank(rank, chosen) for rank in range(self.plan.pipeline))

    def _of_rank(self, rank: int, chosen: tuple[Chosen, ...]) -> StageMemory:
        program, resident = self.program, self.resident[rank]
        exact = self._walked(lambda s: fullest_memory(chosen, program, s, rank, resident)[0])
        tensors = exact.peak
        if chosen:
            even = self._walked(lambda s: rank_memory(program, s, rank, resident))
            exact = replace(exact, chosen=tensors - even.peak)
        if self.plan.expert > 1:
            uneven = partial(rank_memory, chosen=lambda _: UNEVEN)
            more = self._walked(lambda s: uneven(program, s, rank, resident))
            exact = replace(exact, uneven=max(0, more.peak - tensors))
        margin = self.cluster.context_bytes + int(self.cluster.fragmentation * tensors)
        return replace(exact, other=margin, peak=tensors + margin)

    def of_device(self, rank: int, data: int, expert: int) -> StageMemory | None:
        """The memory of one device of a pipeline rank, by its coordinates on the other axes; None
        without a prediction."""
        if self.plan.prediction is None:
            return None
        memory = self.plan.prediction.memory[rank]
        if not self.plan.prediction.chosen:
            return memory
        share = share_of(self.plan.prediction.chosen, data, expert)
        resident = self.resident[rank]
        return rank_memory(self.program, self.schedule, rank, resident, memory.other, share)

    def curves(
        self, spans: Mapping[tuple[str, int, int], tuple[float, float]]
    ) -> tuple[tuple[Sample, ...], ...]:
        """Bytes on each pipeline rank over a step (`planner.memory.exact_memory.rank_curve`)."""
        assert self.plan.prediction is not None
        chosen, program, schedule = self.plan.prediction.chosen, self.program, self.schedule
        return tuple(
            rank_curve(
                program, schedule, m.rank, self.resident[m.rank], spans, m.other,
                chosen=fullest_memory(chosen, program, schedule, m.rank, self.resident[m.rank])[1],
            )
            for m in self.plan.prediction.memory
        )  # fmt: skip


def _grown(short: Any, longer: Any, times: int) -> Any:
    """`short` with the difference to `longer` added so often, in each number of its fields."""
    if isinstance(short, int):
        return short + times * (longer - short)
    if not is_dataclass(short) or isinstance(short, type):
        return short
    pairs = {f.name: (getattr(short, f.name), getattr(longer, f.name)) for f in fields(short)}
    return replace(short, **{name: _grown(a, b, times) for name, (a, b) in pairs.items()})
