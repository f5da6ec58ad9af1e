"""What recorded steps are predicted to take: no time to start operations, and fixed addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.compiler.schedules import schedule_of
from graphaccel.ir.values import returned
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.estimate.estimate import predict
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile
from graphaccel.runtime.cuda_graphs import fixed_bytes

Captured = Callable[[str], StepGraph]


@pytest.mark.parametrize(("schedule", "messages"), [("1f1b", (3, 3)), ("zero_bubble", (3, 4))])
def test_memory_counts_what_lies_at_fixed_addresses(
    captured: Captured, schedule: str, messages: tuple[int, int]
) -> None:
    """As many messages as are there at a time: the first stage has sent two microbatches and got
    the gradient of one back; the last has got one (two, where the gradients of weights come later)
    and sends a gradient while the one before is taken."""
    step = captured("gpt")
    plan = Plan(
        2, pipeline=2, microbatches=4, batch=step.batch_size, schedule=schedule, cuts=("add_4",)
    )
    program = build(step, plan)
    first, last = (fixed_bytes(program, actions) for actions in schedule_of(plan, program))
    stage = program.stages[0]
    (sent,) = (
        n.meta["val"].nbytes
        for n, v in zip(returned(stage.forward), stage.forward_outputs, strict=True)
        if v.kind == "sent"
    )
    loss = 4
    assert (first, last) == (messages[0] * sent, messages[1] * sent + loss)


def test_nothing_is_counted_for_stages_that_are_not_recorded(captured: Captured) -> None:
    step = captured("mixtral")
    plan = Plan(2, expert=2, batch=step.batch_size)
    program = build(step, plan)
    assert [fixed_bytes(program, actions) for actions in schedule_of(plan, program)] == [0]


def test_shards_of_gradients_are_counted_where_they_leave(captured: Captured) -> None:
    step = captured("gpt")
    plan = Plan(2, data=2, microbatches=2, batch=step.batch_size, zero=2)
    program = build(step, plan)
    trained = sum(n.meta["val"].nbytes for n, spec in zip(
        step.graph.graph.find_nodes(op="placeholder"), step.inputs, strict=True)
        if spec.name in step.trainable)  # fmt: skip
    loss, padding = 4, 256
    (found,) = (fixed_bytes(program, actions) for actions in schedule_of(plan, program))
    assert 0 <= found - loss - trained // 2 <= padding


def test_the_process_starts_actions_and_not_their_operations(captured: Captured) -> None:
    """Where a device waits for the process recorded steps are predicted to be faster; not where
    copies to the host inside of them keep them from being recorded."""
    profile, away = Profile(captured("gpt")), ("activations",)

    def seconds(**decided: Any) -> float:
        made = predict(profile, Plan(1, batch=8, **decided), cluster("h100-80gb", 2, None), 8)
        assert made.prediction is not None
        return made.prediction.seconds

    assert seconds(cuda_graphs=True) < 0.5 * seconds()
    assert seconds(cuda_graphs=True, data=2) < 0.5 * seconds(data=2)
    assert seconds(cuda_graphs=True, offload=away) == seconds(offload=away)
