"""The tables of actions of a plan's programs: of a training step, and of an evaluation."""

from __future__ import annotations

from graphaccel.ir.program import StepProgram
from graphaccel.planner.plan.plan import Plan
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Schedule, build, with_head


def schedule_of(plan: Plan, program: StepProgram) -> Schedule:
    """The plan's pipeline schedule with its messages."""
    table = build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    if program.headed:
        table = with_head(table, len(program.stages) - 1)
    return with_communication(table, program.forward_edges, program.backward_edges)


def forward_schedule(plan: Plan, program: StepProgram) -> Schedule:
    """The schedule of an evaluation: forwards only, one microbatch."""
    kind = "gpipe" if plan.interleave == 1 else "interleaved"
    table = build(kind, plan.pipeline, plan.interleave, 1)
    ordered = tuple(
        tuple(sorted((a for a in rank if a.kind == "forward"), key=lambda a: a.stage))
        for rank in table
    )
    return with_communication(ordered, program.forward_edges, frozenset())
