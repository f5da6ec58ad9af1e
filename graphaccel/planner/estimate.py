"""Memory and time of a plan, predicted from the step's profile without running any pass.

Memory follows the liveness of the joint graph, cut into stages; a stage in 1F1B waits for as many
microbatches as the schedule keeps in flight. Time plays the schedule against each stage's seconds:

    step = makespan of the schedule with its messages and what is left of the gradient all-reduces
         + optimizer

Devices are numbered pipeline, data, expert, context, tensor from the outside in: what says most
has the nearest neighbours (the order of Megatron-LM).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.cluster import Cluster
from graphaccel.planner.communication import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
    send_seconds,
)
from graphaccel.planner.outside import gather_seconds, output_bytes
from graphaccel.planner.plan import Plan, Prediction, StageMemory
from graphaccel.planner.profile import Parameter, Profile, SizedProfile
from graphaccel.planner.simulate import Timeline, simulate
from graphaccel.planner.stages import stage_positions
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Schedule, build
from graphaccel.schedule.validate import in_flight

# Of the last backward, the share behind which an all-reduce can hide: the first gradients come
# late.
_OVERLAP = 0.8
# A step of AdamW is about ten element-wise operations for each tensor; on a GPU they run on a
# hundred tensors at once.
_OPTIMIZER_OPS = 10
_TENSORS_AT_ONCE = 100
# Starting a stage's graph for one microbatch costs as much host time as starting some ops.
_LAUNCHES_AN_ACTION = 10


def device_number(plan: Plan, pipeline_rank: int, data_rank: int = 0) -> int:
    """The device that pipeline rank `pipeline_rank` of replica `data_rank` runs on."""
    return (pipeline_rank * plan.data + data_rank) * plan.replica


@dataclass(frozen=True)
class StageWork:
    """One stage of a plan: positions [first, end), seconds a microbatch, bytes of its parameters.

    held: bytes of parameters and buffers. gradient: bytes of gradients. tensors: trained tensors.
    """

    first: int
    end: int
    forward: float
    backward: float
    held: int
    gradient: int
    tensors: int


def stage_works(
    profile: Profile, sized: SizedProfile, plan: Plan, launch_seconds: float
) -> tuple[StageWork, ...]:
    """What each stage of `plan` holds and does. Raises ValueError for cuts that do not fit the
    graph.
    """
    numbers = {name: i for i, name in enumerate(profile.block_names)}
    again = np.isin(profile.block_at, [numbers[name] for name in plan.recompute])
    backward = sized.backward + np.where(again, sized.forward, 0.0)
    action = _LAUNCHES_AN_ACTION * launch_seconds
    works = []
    for first, end in stage_positions(profile, plan.cuts):
        held = held_parameters(profile, [(first, end)])
        trained = [p for p in held if p.trainable]
        works.append(
            StageWork(
                first=first,
                end=end,
                forward=action + float(sized.forward[first:end].sum()),
                backward=action + float(backward[first:end].sum()),
                held=sum(p.bytes for p in held),
                gradient=sum(p.bytes for p in trained),
                tensors=len(trained),
            )
        )
    return tuple(works)


def held_parameters(profile: Profile, spans: Sequence[tuple[int, int]]) -> tuple[Parameter, ...]:
    """Parameters and buffers that positions [first, end) of `spans` read; unused ones lie on stage
    0.
    """

    def here(parameter: Parameter) -> bool:
        places = parameter.positions or (0,)
        return any(first <= p < end for p in places for first, end in spans)

    return tuple(parameter for parameter in profile.parameters if here(parameter))


def flight(plan: Plan) -> dict[int, int]:
    """Stage → the most microbatches it holds at a time."""
    if plan.schedule == "1f1b":
        return {s: min(plan.microbatches, plan.stages - s) for s in range(plan.stages)}
    if plan.schedule == "gpipe":
        return dict.fromkeys(range(plan.stages), plan.microbatches)
    return in_flight(build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches))


def predict_memory(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int
) -> tuple[StageMemory, ...]:
    """Peak bytes of each pipeline rank, by category.

    optimizer_bytes: bytes of optimizer state for each 4-byte trained parameter (8 for AdamW, 0 for
    none).
    """
    sized = _sized(profile, plan, cluster)
    works = stage_works(profile, sized, plan, cluster.device.launch_seconds)
    numbers = {name: i for i, name in enumerate(profile.block_names)}
    recomputed = [numbers[name] for name in plan.recompute]
    saved, again = sized.saved(recomputed)
    waiting = flight(plan)
    accumulated = plan.microbatches > 1 or plan.data > 1
    whole_batch = sized.batch_bytes * plan.data * plan.microbatches
    whole_batch += output_bytes(profile.step, plan.batch)
    ranks = []
    for rank in range(plan.pipeline):
        own = range(rank, plan.stages, plan.pipeline)
        peaks = {
            s: _stage_peak(profile, sized, works[s], saved, again, waiting[s], accumulated)
            for s in own
        }
        total = {s: peaks[s].activation + peaks[s].temporary for s in own}
        top = max(own, key=lambda s: (peaks[s].temporary, -s))
        activation = sum(peaks[s].activation for s in own) + whole_batch
        temporary = peaks[top].temporary
        held = held_parameters(profile, [(works[s].first, works[s].end) for s in own])
        parameter = sum(p.bytes for p in held)
        trained = sum(p.bytes for p in held if p.trainable)
        gradient = trained if accumulated else sum(peaks[s].gradient for s in own)
        optimizer = trained * optimizer_bytes // 4
        if plan.zero:
            group = max(parameter_groups(profile, held).values(), default=0)
            parameter, gradient, optimizer, temporary = _sharded_bytes(
                plan, parameter, gradient, optimizer, temporary, group
            )
        if plan.precision.compute in ("bfloat16", "float16"):
            temporary += trained // 2  # the copy of the weights that is computed with
        tensors = parameter + gradient + optimizer + activation + temporary
        other = cluster.context_bytes + int(cluster.fragmentation * tensors)
        where = max(own, key=lambda s: (total[s], -s))
        ranks.append(
            StageMemory(
                rank, parameter, gradient, optimizer, activation, temporary, other,
                tensors + other, peaks[where].at,
            )
        )  # fmt: skip
    return tuple(ranks)


def parameter_groups(profile: Profile, held: Sequence[Parameter]) -> dict[str, int]:
    """Bytes of parameters by the block that reads them, and outside blocks by name: what ZeRO
    gathers and reduces at once."""
    groups: dict[str, int] = defaultdict(int)
    for parameter in held:
        blocks = {int(profile.block_at[p]) for p in parameter.positions}
        one = blocks.pop() if len(blocks) == 1 else -1
        groups[profile.block_names[one] if one >= 0 else parameter.name] += parameter.bytes
    return groups


def _sharded_bytes(
    plan: Plan, parameter: int, gradient: int, optimizer: int, temporary: int, group: int
) -> tuple[int, int, int, int]:
    """The four under ZeRO. group: the largest group of parameters.

    In flight at a time are one group's gradients and their sum (level 2 up), and one group that is
    used, taken out of what was gathered one by one, beside the next one that travels (level 3).
    """
    ranks = plan.data
    optimizer //= ranks
    if plan.zero >= 2:
        once = plan.microbatches == 1 or plan.accumulation == "shards"
        gradient = gradient // ranks if once else gradient
        temporary += 2 * group if once else group // ranks
    if plan.zero == 3:
        kept = parameter if not plan.gather_again else 2 * group
        parameter = parameter // ranks
        temporary += kept
    return parameter, gradient, optimizer, temporary


@dataclass(frozen=True)
class _Peak:
    activation: int
    temporary: int
    gradient: int
    at: str


def _stage_peak(
    profile: Profile,
    sized: SizedProfile,
    work: StageWork,
    saved: np.ndarray,
    again: np.ndarray,
    waiting: int,
    accumulated: bool,
) -> _Peak:
    """Where a stage holds most, with `waiting` microbatches in flight.

    accumulated: gradients lie in buckets the whole step; otherwise they come as backward proceeds.
    """
    here = slice(work.first, work.end)
    running = np.cumsum(saved[here])
    before = (waiting - 1) * int(running[-1])
    # What a block makes again is alive from the block's end down to where backward reads it.
    remade = np.zeros(work.end - work.first, dtype=np.int64)
    for block in {b for b in profile.block_at[here].tolist() if b >= 0}:
        inside = profile.block_at[here] == block
        remade[inside] = np.cumsum(again[here][inside])
    backward = sized.passing_backward[here] + remade
    ready = np.zeros_like(remade)
    if not accumulated:
        made = sized.gradients[here]
        ready = np.cumsum(made[::-1])[::-1] - made  # of later positions: backward did those first
    choices = (
        ("forward", sized.passing_forward[here], np.zeros_like(ready)),
        ("backward", backward, ready),
    )
    phase, passing, early = max(choices, key=lambda c: int((running + c[1] + c[2]).max()))
    top = int((running + passing + early).argmax())
    module = profile.modules[work.first + top] or profile.names[work.first + top]
    gradient = work.gradient if accumulated else int(early[top])
    return _Peak(before + int(running[top]), int(passing[top]), gradient, f"{phase} of {module}")


def message_bytes(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], int]:
    """Bytes of each message: (source stage, destination stage, "forward" or "backward")."""
    ends = np.array([end - 1 for _, end in stage_positions(profile, plan.cuts)])
    found: dict[tuple[int, int, str], int] = defaultdict(int)
    for storage, positions in profile.crossing:
        source = int(np.searchsorted(ends, storage.at))
        if positions[-1] <= ends[source]:
            continue
        for reader in sorted(set(np.searchsorted(ends, positions).tolist()) - {source}):
            found[source, reader, "forward"] += int(sized.bytes[storage.index])
            if storage.floating:
                found[reader, source, "backward"] += int(sized.bytes[storage.index])
    return dict(found)


def predict_seconds(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, *, simulated: bool = True
) -> Prediction:
    """Seconds of a step, and where they go on the rank that works most. No memory in it.

    simulated: play the schedule; otherwise the closed form of 1F1B, m * t + (sum - t) / interleave
    with t the busiest rank's seconds a microbatch, which is exact for even stages and free
    messages.
    """
    sized = _sized(profile, plan, cluster)
    works = stage_works(profile, sized, plan, cluster.device.launch_seconds)
    edges = _edge_seconds(profile, sized, plan, cluster)
    reduces = [_reduce_seconds(profile, work, plan, cluster, s) for s, work in enumerate(works)]
    optimizer = max(
        _optimizer_seconds([works[s] for s in range(rank, plan.stages, plan.pipeline)],
                           cluster, optimizer_bytes, plan.data if plan.zero else 1)
        for rank in range(plan.pipeline)
    )  # fmt: skip
    if simulated:
        compute, bubble, communication = _played(plan, works, edges, reduces)
    else:
        compute, bubble, communication = _closed(plan, works, edges, reduces)
    communication += gather_seconds(profile.step, plan, cluster)
    return Prediction(
        seconds=compute + bubble + communication + optimizer,
        compute=compute,
        communication=communication,
        bubble=bubble,
        optimizer=optimizer,
    )


def _played(
    plan: Plan,
    works: Sequence[StageWork],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    """(compute, bubble, communication) seconds by simulation, with messages and without."""
    _, real = _play(plan, works, edges, reduces)
    _, ideal = _play(plan, works, dict.fromkeys(edges, 0.0), [0.0] * len(works))
    compute = max(ideal.busy)
    return compute, ideal.makespan - compute, max(real.makespan - ideal.makespan, 0.0)


def _play(
    plan: Plan,
    works: Sequence[StageWork],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[Schedule, Timeline]:
    table = build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    ahead = frozenset((a, b) for a, b, way in edges if way == "forward")
    back = frozenset((a, b) for a, b, way in edges if way == "backward")
    schedule = with_communication(table, ahead, back)
    forward, backward = [w.forward for w in works], [w.backward for w in works]
    return schedule, simulate(schedule, forward, backward, edges, reduces)


def timeline(profile: Profile, plan: Plan, cluster: Cluster) -> tuple[Schedule, Timeline]:
    """The plan's schedule with its messages, and when each of its actions happens."""
    sized = _sized(profile, plan, cluster)
    works = stage_works(profile, sized, plan, cluster.device.launch_seconds)
    edges = _edge_seconds(profile, sized, plan, cluster)
    reduces = [_reduce_seconds(profile, work, plan, cluster, s) for s, work in enumerate(works)]
    return _play(plan, works, edges, reduces)


def _closed(
    plan: Plan,
    works: Sequence[StageWork],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    per_stage = [w.forward + w.backward for w in works]
    ranks = range(plan.pipeline)
    busiest = max(sum(per_stage[r :: plan.pipeline]) for r in ranks)
    bubble = max(sum(per_stage) - busiest, 0.0) / plan.interleave
    exposed = sum(edges.values()) + max(sum(reduces[r :: plan.pipeline]) for r in ranks)
    return plan.microbatches * busiest, bubble, exposed


def _sized(profile: Profile, plan: Plan, cluster: Cluster) -> SizedProfile:
    return profile.sized(plan.microbatch_size, cluster.device, plan.precision.compute)


def _edge_seconds(
    profile: Profile, sized: SizedProfile, plan: Plan, cluster: Cluster
) -> dict[tuple[int, int, str], float]:
    """Seconds of each message that goes to another rank."""
    seconds = {}
    for (source, destination, way), size in message_bytes(profile, sized, plan).items():
        a, b = source % plan.pipeline, destination % plan.pipeline
        if a != b:
            numbers = device_number(plan, a), device_number(plan, b)
            seconds[source, destination, way] = send_seconds(cluster, size, *numbers)
    return seconds


def _reduce_seconds(
    profile: Profile, work: StageWork, plan: Plan, cluster: Cluster, stage: int
) -> float:
    """Seconds of a stage's gradient all-reduce that no backward hides.

    On a GPU it runs beside the last microbatch's backward, bucket by bucket; the last bucket comes
    after it. On a CPU both want the same cores. A parameter that several stages use is summed over
    them.
    """
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    size = work.gradient * width / 4
    total = _bucketed(cluster, size, plan)
    exposed = total
    if cluster.device.name != "cpu" and total:
        last = _bucketed(cluster, min(size, plan.bucket_bytes), plan)
        exposed = max(last, total - _OVERLAP * work.backward)
    if plan.zero >= 2 and plan.accumulation == "shards":
        exposed *= plan.microbatches
    exposed += _gather_seconds(profile, work, plan, cluster)
    return exposed + _shared_seconds(profile, work, plan, cluster, stage)


def _gather_seconds(profile: Profile, work: StageWork, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a step's all-gathers of parameters that no computation hides.

    Levels 1 and 2 gather what the optimizer changed, once, after it. Level 3 gathers each group
    ahead of use in every forward, and again in every backward where the plan says so.
    """
    if not plan.zero or plan.data == 1:
        return 0.0
    sizes = list(parameter_groups(profile, held_parameters(profile, [(work.first, work.end)])
                                  ).values())  # fmt: skip
    if plan.zero < 3:
        return _gathers(cluster, [work.gradient], plan)
    once = _gathers(cluster, sizes, plan)
    first = _gathers(cluster, [max(sizes, default=0)], plan)
    exposed = 0.0
    for seconds in (work.forward, work.backward) if plan.gather_again else (work.forward,):
        hidden = 0.0 if cluster.device.name == "cpu" else _OVERLAP * seconds
        exposed += max(first, once - hidden)
    return plan.microbatches * exposed


def _gathers(cluster: Cluster, sizes: Sequence[int], plan: Plan) -> float:
    return sum(all_gather_seconds(cluster, size, plan.data, plan.replica) for size in sizes)


def _bucketed(cluster: Cluster, size: float, plan: Plan) -> float:
    if plan.data == 1 or size <= 0:
        return 0.0
    buckets = max(1, math.ceil(size / plan.bucket_bytes))
    if plan.zero >= 2:  # a reduce-scatter
        seconds = reduce_scatter_seconds(cluster, size / buckets, plan.data, stride=plan.replica)
        return buckets * seconds
    return buckets * all_reduce_seconds(cluster, size / buckets, plan.data, stride=plan.replica)


def _shared_seconds(
    profile: Profile, work: StageWork, plan: Plan, cluster: Cluster, stage: int
) -> float:
    """Seconds to sum the gradients of parameters that other ranks' stages use too: there and
    back.
    """
    if plan.pipeline == 1:
        return 0.0
    size = sum(
        p.bytes
        for p in profile.parameters
        if p.trainable
        and any(work.first <= at < work.end for at in p.positions)
        and any(not work.first <= at < work.end for at in p.positions)
    )
    rank = stage % plan.pipeline
    other = device_number(plan, rank - 1 if rank else 1)
    return 2 * send_seconds(cluster, size, device_number(plan, rank), other)


def _optimizer_seconds(
    works: Sequence[StageWork], cluster: Cluster, optimizer_bytes: int, shards: int = 1
) -> float:
    """Read parameter, gradient and state, write parameter and state, at memory bandwidth.

    shards: ranks that share the work (ZeRO)."""
    gradient = sum(w.gradient for w in works) / shards
    tensors = sum(w.tensors for w in works)
    traffic = gradient * (3 + 2 * optimizer_bytes / 4)
    device = cluster.device
    launches = tensors if device.name == "cpu" else math.ceil(tensors / _TENSORS_AT_ONCE)
    return traffic / device.memory_bandwidth + launches * _OPTIMIZER_OPS * device.launch_seconds


def predict(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, *, simulated: bool = True
) -> Plan:
    """`plan` with its prediction: seconds and memory."""
    seconds = predict_seconds(profile, plan, cluster, optimizer_bytes, simulated=simulated)
    memory = predict_memory(profile, plan, cluster, optimizer_bytes)
    return replace(plan, prediction=replace(seconds, memory=memory))
