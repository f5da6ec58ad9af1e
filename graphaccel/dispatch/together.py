"""Captures and plans on one rank for all ranks of a run."""

from __future__ import annotations

from graphaccel.capture.batch import Batch
from graphaccel.compiler.compiler import Compiler, Planned
from graphaccel.dispatch.run import Run
from graphaccel.errors import GraphMisuse
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.broadcast import depends_on, share_capture, share_plan
from graphaccel.runtime.execution.answers import from_all


def capture_together(run: Run, batch: Batch) -> None:
    """Capture a batch on one rank, and send the result to the others. Collective."""
    if run.settings.devices == 1:
        return
    compiler = run.compiler
    share_capture(
        compiler.captures.knows(batch),
        depends_on(run.model, batch.signature(), compiler.model.loss_fn),
        lambda: compiler.capture(batch)[0],
        lambda step: compiler.captures.keep(batch, step),
    )


def choose_together(compiler: Compiler, batch: Batch, ranks: int) -> Planned:
    """`compiler.choose` on one rank for all; each rank builds its programs. Collective."""
    here: list[Planned] = []
    received: list[Plan] = []

    def choose() -> Plan:
        here.append(compiler.choose(batch))
        return here[0].plan

    if ranks > 1:
        known = compiler.given is not None
        share_plan(known, compiler.digest(batch), choose, received.append)
    if here:
        return here[0]
    return compiler.choose(batch, given=received[0] if received else None)


def check_same_plan(plan: Plan, ranks: int) -> None:
    """Compare the plan across ranks. Collective. Raises GraphMisuse (GA407) on every rank where one
    has another plan."""
    if ranks == 1:
        return
    if len(set(from_all(plan.to_json(), "the plans of all ranks"))) > 1:
        raise GraphMisuse(
            what="the ranks chose different plans: their models, batches or versions differ",
            help_line="seed every rank alike and give them the same example batch",
        )
