"""Predicts memory and time of a plan from the step's profile, without running any pass.

Memory is that of `planner.estimate.estimated_memory`. Time simulates the schedule with each stage's
seconds:

    step = makespan of the schedule with its messages and the exposed part of gradient all-reduces
         + optimizer

Messages are those of `planner.estimate.stage_messages`, traffic over data is in
`planner.estimate.data_axis`, the optimizer in `planner.estimate.optimizer_time`. Devices are
numbered in the plan's order of the axes (`planner.plan.axis_order`). With tensor, context and
expert axes the profile is that of the graph of one of their devices
(`planner.profile.layout_profiles`), which has their collectives as nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.activation_offload import with_copies
from graphaccel.planner.estimate.cpu_oversubscription import shared_makespan
from graphaccel.planner.estimate.data_axis import reduce_seconds
from graphaccel.planner.estimate.estimated_memory import predict_memory
from graphaccel.planner.estimate.external_loss import gather_seconds
from graphaccel.planner.estimate.optimizer_memory import NOTHING, OptimizerMemory
from graphaccel.planner.estimate.optimizer_time import step_seconds, stepped
from graphaccel.planner.estimate.parameter_prefetch import with_uploads
from graphaccel.planner.estimate.simulate import Timeline, play, simulate
from graphaccel.planner.estimate.stage_costs import StageCost, sized_for, stage_costs
from graphaccel.planner.estimate.stage_messages import edge_seconds
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.profile.profile import Profile
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Schedule, build


def predict_seconds(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, *, simulated: bool = True
) -> Prediction:
    """Seconds of a step, and their parts on the rank with the most compute, without memory.

    simulated: simulate the schedule; otherwise use the closed form of 1F1B, m * t + (sum - t) /
    interleave with t the busiest rank's seconds a microbatch, which is exact for even stages and
    free messages; with separate weight gradients each other stage adds F + B - W instead of F + B +
    W.
    """
    sized = sized_for(profile, plan, cluster)
    costs = stage_costs(profile, sized, plan, cluster.device.launch_seconds)
    edges = edge_seconds(profile, sized, plan, cluster)
    reduces = reduce_seconds(profile, costs, plan, cluster)
    crowding, ranks = cluster.device.crowd, range(plan.pipeline)
    if crowding != 1:
        costs = tuple(work.shorter(crowding) for work in costs)
    held = {stepped(profile, plan, costs[r :: plan.pipeline]) for r in ranks}
    optimizer, copies = max(
        step_seconds(*each, cluster, optimizer_bytes, plan.offload) for each in held
    )
    price = _played if simulated else _closed
    compute, bubble, communication = price(plan, costs, edges, reduces)
    longer = costs
    if "activations" in plan.offload:
        longer = with_copies(profile, sized, plan, longer, cluster)
    if "parameters" in plan.offload:
        longer = with_uploads(profile, plan, costs, longer, cluster)
    if longer is not costs:
        copies += sum(price(plan, longer, edges, reduces)) - compute - bubble - communication
    if crowding > 1:  # a waiting rank leaves its core to others, until all cores are busy
        busy = [sum(w.forward + w.backward for w in costs[r :: plan.pipeline]) for r in ranks]
        least = crowding * plan.microbatches * sum(busy) / len(busy)
        whole = max(compute + bubble, least)
        if simulated:
            shape = plan.schedule, plan.pipeline, plan.interleave, plan.microbatches
            own = _durations(plan, [work.alone for work in costs])
            equal_processes = plan.devices // plan.pipeline
            shared = shared_makespan(shape, own, edges, equal_processes, plan.devices / crowding)
            whole = max(whole, shared)
        compute = max(compute, least)
        bubble = whole - compute
    communication += gather_seconds(profile.step, plan, cluster)
    return Prediction(
        seconds=compute + bubble + communication + optimizer + copies,
        compute=compute,
        communication=communication,
        bubble=bubble,
        optimizer=optimizer,
        offload=copies,
    )


def _played(
    plan: Plan,
    costs: Sequence[StageCost],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    """(compute, bubble, communication) seconds by simulation, with messages and without."""
    shape = plan.schedule, plan.pipeline, plan.interleave, plan.microbatches
    real = play(shape, _durations(plan, costs), edges, reduces)
    alone = _durations(plan, [work.alone for work in costs])
    ideal = play(shape, alone, dict.fromkeys(edges, 0.0), [0.0] * len(costs))
    compute = max(ideal.busy)
    return compute, ideal.makespan - compute, max(real.makespan - ideal.makespan, 0.0)


def _durations(
    plan: Plan, costs: Sequence[StageCost]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of forward, backward and weight, per stage."""
    forward, backward = [w.forward for w in costs], [w.backward for w in costs]
    if plan.schedule == "zero_bubble":
        backward = [w.backward - w.weight for w in costs]
    return forward, backward, [w.weight + w.action for w in costs]


def _play(
    plan: Plan,
    costs: Sequence[StageCost],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[Schedule, Timeline]:
    table = build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    ahead = frozenset((a, b) for a, b, way in edges if way == "forward")
    back = frozenset((a, b) for a, b, way in edges if way == "backward")
    schedule = with_communication(table, ahead, back)
    forward, backward, weight = _durations(plan, costs)
    return schedule, simulate(schedule, forward, backward, edges, reduces, weight)


def timeline(profile: Profile, plan: Plan, cluster: Cluster) -> tuple[Schedule, Timeline]:
    """The plan's schedule with its messages, and when each of its actions happens."""
    sized = sized_for(profile, plan, cluster)
    costs = stage_costs(profile, sized, plan, cluster.device.launch_seconds)
    edges = edge_seconds(profile, sized, plan, cluster)
    reduces = reduce_seconds(profile, costs, plan, cluster)
    return _play(plan, costs, edges, reduces)


def _closed(
    plan: Plan,
    costs: Sequence[StageCost],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    per_stage = [w.forward + w.backward for w in costs]
    ranks = range(plan.pipeline)
    top = max(ranks, key=lambda r: sum(per_stage[r :: plan.pipeline]))
    busiest = sum(per_stage[top :: plan.pipeline])
    sent = sum(w.sent_forward + w.sent_backward for w in costs[top :: plan.pipeline])
    bubble = max(sum(per_stage) - busiest, 0.0) / plan.interleave
    if plan.schedule == "zero_bubble":
        others = [w for i, w in enumerate(costs) if i != top]
        bubble = sum(max(0.0, w.forward + w.backward - 2 * w.weight) for w in others)
    exposed = sum(edges.values()) + max(sum(reduces[r :: plan.pipeline]) for r in ranks)
    exposed += plan.microbatches * sent
    return plan.microbatches * (busiest - sent), bubble, exposed


def predict(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    optimizer_bytes: int,
    step_memory: OptimizerMemory = NOTHING,
    *,
    simulated: bool = True,
) -> Plan:
    """`plan` with its prediction: seconds and memory."""
    seconds = predict_seconds(profile, plan, cluster, optimizer_bytes, simulated=simulated)
    memory = predict_memory(profile, plan, cluster, optimizer_bytes, step_memory)
    return replace(plan, prediction=replace(seconds, memory=memory))
