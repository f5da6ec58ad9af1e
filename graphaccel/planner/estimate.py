"""Memory and time of a plan, predicted from the step's profile without running any pass.

Memory is that of `planner.footprint`. Time plays the schedule against each stage's seconds:

    step = makespan of the schedule with its messages and what is left of the gradient all-reduces
         + optimizer

Devices are numbered in the plan's order of the axes (`planner.order`). Under tensor, context and
expert the profile is that of the graph of one of their devices (`planner.layouts`), in which their
collectives stand as nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from graphaccel.planner.away import with_copies
from graphaccel.planner.buckets import bucket_count, copy_seconds
from graphaccel.planner.cluster import Cluster, Device, OpTime
from graphaccel.planner.communication import (
    INTERFERENCE,
    all_gather_seconds,
    exposed_seconds,
    link_between,
    reduce_scatter_seconds,
    send_seconds,
)
from graphaccel.planner.cost import OPTIMIZER
from graphaccel.planner.crowd import shared_makespan
from graphaccel.planner.footprint import gathered_sizes, in_parts, predict_memory
from graphaccel.planner.offload import host_step_seconds
from graphaccel.planner.order import number_of
from graphaccel.planner.outside import gather_seconds
from graphaccel.planner.plan import GATHERS, Plan, Prediction
from graphaccel.planner.profile import Profile, SizedProfile
from graphaccel.planner.shares import kept_bytes, kept_whole, perhaps_kept
from graphaccel.planner.simulate import Timeline, play, simulate
from graphaccel.planner.stages import stage_positions
from graphaccel.planner.stepping import NOTHING, Stepping
from graphaccel.planner.uploads import with_uploads
from graphaccel.planner.wires import wires_of
from graphaccel.planner.works import StageWork, held_parameters, sized_for, stage_works
from graphaccel.schedule.communicate import with_communication
from graphaccel.schedule.table import Schedule, build

# A step of AdamW is about ten element-wise operations for each tensor; on a GPU they run on a
# hundred tensors at once.
_OPTIMIZER_OPS = 10
_TENSORS_AT_ONCE = 100


def device_number(plan: Plan, pipeline_rank: int, data_rank: int = 0) -> int:
    """The device that pipeline rank `pipeline_rank` of replica `data_rank` runs on, the first of
    those that hold the stage together."""
    between, within = divmod(data_rank, plan.shards)
    place = {"pipeline": pipeline_rank, "data": data_rank, "replicate": between, "shard": within}
    return number_of(plan.sizes, place)


def scatters(plan: Plan, cluster: Cluster) -> bool:
    """Whether sending in parts pays: of S bytes, (t - 1) / t go over the links between the tensor
    ranks of a stage in place of those between stages."""
    if plan.tensor == 1 or plan.pipeline == 1:
        return False
    numbers = [device_number(plan, rank) for rank in range(plan.pipeline)]
    between = min(link_between(cluster, *pair).bandwidth for pair in pairwise(numbers))
    return link_between(cluster, 0, (plan.tensor - 1) * plan.stride("tensor")).bandwidth > between


def message_bytes(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], int]:
    """Bytes of each message: (source stage, destination stage, "forward" or "backward")."""
    return {key: sent for key, (sent, _) in _messages(profile, sized, plan).items()}


def gathered_bytes(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], int]:
    """Bytes that the tensor ranks of a destination gather of each message that comes in parts."""
    found = _messages(profile, sized, plan).items()
    return {key: gathered for key, (_, gathered) in found if gathered}


def _messages(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], tuple[int, int]]:
    """(bytes sent, bytes gathered of it) by message."""
    key = ("messages", plan.cuts, plan.scatter_sends)
    return sized.once(key, lambda: _find_messages(profile, sized, plan))


def _find_messages(
    profile: Profile, sized: SizedProfile, plan: Plan
) -> dict[tuple[int, int, str], tuple[int, int]]:
    ends = np.array([end - 1 for _, end in stage_positions(profile, plan.cuts)])
    crossing = profile.crossing
    source = np.searchsorted(ends, crossing.at)
    which, place = crossing.uses
    reader = np.searchsorted(ends, place)
    far = reader != source[which]
    whole, floating = sized.bytes[crossing.storage], profile.storages.floating[crossing.storage]
    parts = in_parts(profile, sized, plan)
    sent, gathered = np.where(parts, whole // plan.tensor, whole), np.where(parts, whole, 0)
    found: dict[tuple[int, int, str], np.ndarray] = defaultdict(lambda: np.zeros(2, dtype=int))
    for value, stage in sorted(set(zip(which[far].tolist(), reader[far].tolist(), strict=True))):
        message = np.array((sent[value], gathered[value]))
        found[int(source[value]), stage, "forward"] += message
        if floating[value]:
            found[stage, int(source[value]), "backward"] += message
    return {key: (int(both[0]), int(both[1])) for key, both in found.items()}


def predict_seconds(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, *, simulated: bool = True
) -> Prediction:
    """Seconds of a step, and where they go on the rank that works most. No memory in it.

    simulated: play the schedule; otherwise the closed form of 1F1B, m * t + (sum - t) / interleave
    with t the busiest rank's seconds a microbatch, which is exact for even stages and free
    messages; weights apart leave F + B - W of each other stage instead of F + B + W.
    """
    sized = sized_for(profile, plan, cluster)
    works = stage_works(profile, sized, plan, cluster.device.launch_seconds)
    edges = _edge_seconds(profile, sized, plan, cluster)
    reduces = _reduces(profile, works, plan, cluster)
    crowd, ranks = cluster.device.crowd, range(plan.pipeline)
    if crowd != 1:
        works = tuple(work.shorter(crowd) for work in works)
    held = {_stepped(profile, plan, works[r :: plan.pipeline]) for r in ranks}
    optimizer, copies = max(
        _step_seconds(*each, cluster, optimizer_bytes, plan.offload) for each in held
    )
    price = _played if simulated else _closed
    compute, bubble, communication = price(plan, works, edges, reduces)
    longer = works
    if "activations" in plan.offload:
        longer = with_copies(profile, sized, plan, longer, cluster)
    if "parameters" in plan.offload:
        longer = with_uploads(profile, plan, works, longer, cluster)
    if longer is not works:
        copies += sum(price(plan, longer, edges, reduces)) - compute - bubble - communication
    if crowd > 1:  # who waits leaves its core to others, until all cores are busy
        busy = [sum(w.forward + w.backward for w in works[r :: plan.pipeline]) for r in ranks]
        least = crowd * plan.microbatches * sum(busy) / len(busy)
        whole = max(compute + bubble, least)
        if simulated:
            shape = plan.schedule, plan.pipeline, plan.interleave, plan.microbatches
            own = _durations(plan, [work.alone for work in works])
            alike = plan.devices // plan.pipeline
            shared = shared_makespan(shape, own, edges, alike, plan.devices / crowd)
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
    works: Sequence[StageWork],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    """(compute, bubble, communication) seconds by simulation, with messages and without."""
    shape = plan.schedule, plan.pipeline, plan.interleave, plan.microbatches
    real = play(shape, _durations(plan, works), edges, reduces)
    alone = _durations(plan, [work.alone for work in works])
    ideal = play(shape, alone, dict.fromkeys(edges, 0.0), [0.0] * len(works))
    compute = max(ideal.busy)
    return compute, ideal.makespan - compute, max(real.makespan - ideal.makespan, 0.0)


def _durations(
    plan: Plan, works: Sequence[StageWork]
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of forward, backward and weight, per stage."""
    forward, backward = [w.forward for w in works], [w.backward for w in works]
    if plan.schedule == "zero_bubble":
        backward = [w.backward - w.weight for w in works]
    return forward, backward, [w.weight + w.action for w in works]


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
    forward, backward, weight = _durations(plan, works)
    return schedule, simulate(schedule, forward, backward, edges, reduces, weight)


def timeline(profile: Profile, plan: Plan, cluster: Cluster) -> tuple[Schedule, Timeline]:
    """The plan's schedule with its messages, and when each of its actions happens."""
    sized = sized_for(profile, plan, cluster)
    works = stage_works(profile, sized, plan, cluster.device.launch_seconds)
    edges = _edge_seconds(profile, sized, plan, cluster)
    reduces = _reduces(profile, works, plan, cluster)
    return _play(plan, works, edges, reduces)


def _closed(
    plan: Plan,
    works: Sequence[StageWork],
    edges: Mapping[tuple[int, int, str], float],
    reduces: Sequence[float],
) -> tuple[float, float, float]:
    per_stage = [w.forward + w.backward for w in works]
    ranks = range(plan.pipeline)
    top = max(ranks, key=lambda r: sum(per_stage[r :: plan.pipeline]))
    busiest = sum(per_stage[top :: plan.pipeline])
    sent = sum(w.sent_forward + w.sent_backward for w in works[top :: plan.pipeline])
    bubble = max(sum(per_stage) - busiest, 0.0) / plan.interleave
    if plan.schedule == "zero_bubble":
        others = [w for i, w in enumerate(works) if i != top]
        bubble = sum(max(0.0, w.forward + w.backward - 2 * w.weight) for w in others)
    exposed = sum(edges.values()) + max(sum(reduces[r :: plan.pipeline]) for r in ranks)
    exposed += plan.microbatches * sent
    return plan.microbatches * (busiest - sent), bubble, exposed


def _edge_seconds(
    profile: Profile, sized: SizedProfile, plan: Plan, cluster: Cluster
) -> dict[tuple[int, int, str], float]:
    """Seconds of each message that goes to another rank."""

    def made() -> dict[tuple[int, int, str], float]:
        seconds = {}
        for (source, destination, way), size in message_bytes(profile, sized, plan).items():
            a, b = source % plan.pipeline, destination % plan.pipeline
            if a != b:
                numbers = device_number(plan, a), device_number(plan, b)
                seconds[source, destination, way] = send_seconds(cluster, size, *numbers)
                whole = gathered.get((source, destination, way), 0)
                seconds[source, destination, way] += all_gather_seconds(cluster, whole, *tensor)
        return seconds

    gathered = gathered_bytes(profile, sized, plan)
    tensor = plan.tensor, plan.stride("tensor")
    mesh = plan.pipeline, plan.stride("pipeline"), *tensor, plan.scatter_sends
    key = ("edges", plan.cuts, *mesh, cluster.links, cluster.count)
    return sized.once(key, made)


def _reduces(
    profile: Profile, works: Sequence[StageWork], plan: Plan, cluster: Cluster
) -> list[float]:
    """Seconds of each stage's gradients and parameters that nothing hides; equal stages once."""
    shared = profile.once(("shared", plan.cuts), lambda: _shared_bytes(profile, works))
    known: dict[object, float] = {}
    found = []
    for stage, work in enumerate(works):
        alike: object = work.gradient, work.partial, work.backward, work.weight
        alike = alike, kept_bytes(profile, plan, [(work.first, work.end)])
        if plan.zero == 3 and plan.data > 1:  # what is held matters
            alike = alike, work.forward, _groups(profile, work, plan)
        if alike not in known:
            known[alike] = _reduce_seconds(profile, work, plan, cluster)
        found.append(known[alike] + _shared_seconds(shared[stage], plan, cluster, stage))
    return found


def _reduce_seconds(profile: Profile, work: StageWork, plan: Plan, cluster: Cluster) -> float:
    """Seconds by which what moves over data makes a step longer on a stage: its gradients beside
    the last microbatch's backward, or beside each; parameters (`_gathered`) beside forward and
    backward, or after the optimizer."""
    before, last, copies = _summed(profile, work, plan, cluster)
    summing = plan.microbatches if plan.accumulation == "shards" and plan.zero >= 2 else 1
    beside = work.weight if plan.schedule == "zero_bubble" else work.backward

    def backwards(*gathered: tuple[float, float]) -> float:
        """Of the backwards that sum gradients, beside which others gather parameters."""
        found = _exposed(cluster, beside, last, *gathered)
        return found + (summing - 1) * _exposed(cluster, beside, before, *gathered) + copies

    if not plan.zero or plan.data == 1:
        return _exposed(cluster, beside, last)
    if plan.zero < 3:
        return backwards() + _gathered_after(profile, work, plan, cluster)
    gathered, more = _gathered(profile, work, plan, cluster)
    gathering = 1 if plan.holds_gathered else plan.microbatches
    ahead = gathering * (_exposed(cluster, work.forward, gathered) + more)
    if plan.gather_again is not True:
        return backwards() + ahead
    alone = (gathering - summing) * _exposed(cluster, beside, gathered)
    return backwards(gathered) + alone + gathering * more + ahead


def _exposed(cluster: Cluster, beside: float, *moves: tuple[float, float]) -> float:
    """moves: (seconds, those of a piece) of collectives that share the links beside a phase."""
    moved, piece = (sum(each) for each in zip(*moves, strict=True))
    return exposed_seconds(cluster.device, moved, piece, beside)


def _summed(
    profile: Profile, work: StageWork, plan: Plan, cluster: Cluster
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """(what each microbatch that sums a stage's gradients moves, what the last one moves, seconds
    of copies around it in a step); what is moved: (seconds, those of its slowest collective)."""
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    sizes = {axes: size * width / 4 for axes, size in work.summed.items() if size > 0}
    counts = reduce_counts(profile, work, plan, sizes)
    one = {x: _bucketed(cluster, sizes[x] / counts[x], x, plan) for x in sizes}
    if plan.zero >= 2:  # what stays whole is not scattered: its sum is gathered besides
        kept = kept_bytes(profile, plan, [(work.first, work.end)]).trained / max(1, work.gradient)
        one = {x: (scattered * (1 + kept), rest) for x, (scattered, rest) in one.items()}

    def moved(seconds: Mapping[tuple[str, ...], float]) -> tuple[float, float]:
        total = sum(counts[axes] * each for axes, each in seconds.items())
        return total, max(seconds.values(), default=0.0)

    copies = 0.0
    if plan.zero >= 2 and plan.data > 1:  # written into its group's flat tensor, or added there
        copies = plan.microbatches * copy_seconds(sum(sizes.values()), cluster.device)
    before = moved({axes: scattered for axes, (scattered, _) in one.items()})
    return before, moved({axes: sum(each) for axes, each in one.items()}), copies


def reduce_counts(
    profile: Profile, work: StageWork, plan: Plan, sizes: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], int]:
    """Collectives that sum a stage's gradients in a backward, by the axes besides data: with ZeRO 3
    one for each group of parameters, otherwise one for each bucket. sizes: bytes by axes."""
    total = sum(sizes.values())
    if plan.zero == 3 and plan.data > 1:
        groups = len(_groups(profile, work, plan))
        return {axes: max(1, math.ceil(groups * size / total)) for axes, size in sizes.items()}
    scattered = plan.zero == 2 and plan.data > 1
    return {axes: bucket_count(size, plan.bucket_bytes, total, scattered=scattered)
            for axes, size in sizes.items()}  # fmt: skip


def _gathered_after(profile: Profile, work: StageWork, plan: Plan, cluster: Cluster) -> float:
    """Seconds to gather what the optimizer changed, once, after it (ZeRO 1 and 2): a rank's part is
    copied into a bucket, and those of others out of it."""
    shared = work.gradient - kept_bytes(profile, plan, [(work.first, work.end)]).trained
    if not shared:
        return 0.0
    calls = math.ceil(shared / plan.bucket_bytes)
    copies = copy_seconds(shared, cluster.device)
    return copies + _gathers(cluster, [shared / calls] * calls, plan)


def _gathered(
    profile: Profile, work: StageWork, plan: Plan, cluster: Cluster
) -> tuple[tuple[float, float], float]:
    """((seconds to gather all groups of a stage, those of the first), seconds of copies) of ZeRO 3:
    each group ahead of use in every forward, and again in every backward where the plan says so; or
    all of them once, beside the first forward."""
    sizes = _groups(profile, work, plan)
    first = _gathers(cluster, sorted(sizes)[-1:], plan)
    return (_gathers(cluster, sizes, plan), first), copy_seconds(sum(sizes), cluster.device)


def _groups(profile: Profile, work: StageWork, plan: Plan) -> tuple[int, ...]:
    """Bytes of what ZeRO 3 gathers at once of a stage."""
    span = (work.first, work.end)
    key = "groups", span, plan.gathers_low, kept_whole(profile, plan)
    return profile.once(key, lambda: tuple(
        gathered_sizes(profile, held_parameters(profile, [span]), plan)))  # fmt: skip


def _gathers(cluster: Cluster, sizes: Sequence[float], plan: Plan) -> float:
    apart = plan.stride("data")
    each = {s: all_gather_seconds(cluster, s, plan.shards, apart) for s in set(sizes)}
    return sum(each[size] for size in sizes)


def _bucketed(
    cluster: Cluster, size: float, axes: tuple[str, ...], plan: Plan
) -> tuple[float, float]:
    """Seconds to sum a bucket of `size` bytes of gradients over data and `axes`: (to scatter it, in
    each microbatch that reduces it; of what the last one does besides).

    ZeRO 2 and 3 scatter it over the devices that shard; the shards are then summed.
    """
    if size <= 0:
        return 0.0, 0.0
    if plan.zero < 2 or plan.data == 1:
        return 0.0, wires_of(cluster, plan).all_reduce(size, ("data", *axes))
    seconds = reduce_scatter_seconds(cluster, size, plan.shards, plan.stride("data"))
    return seconds, shards_seconds(cluster, size / plan.shards, axes, plan)


def shards_seconds(cluster: Cluster, size: float, axes: tuple[str, ...], plan: Plan) -> float:
    """Seconds to sum shards of `size` bytes of gradients over their replicas and `axes`: one
    all-reduce over both, which takes no longer than one after the other."""
    wires = wires_of(cluster, plan)
    return wires.all_reduce(size, ("replicate",)) + wires.all_reduce(size, axes)


def _shared_bytes(profile: Profile, works: Sequence[StageWork]) -> list[int]:
    """Of each stage, bytes of trained parameters that other stages use too."""
    ends = np.array([work.end for work in works])
    found = [0] * len(works)
    for parameter in profile.parameters:
        if parameter.trainable and len(parameter.positions) > 1:
            stages = set(np.searchsorted(ends, parameter.positions, side="right").tolist())
            for stage in stages if len(stages) > 1 else ():
                found[stage] += parameter.bytes
    return found


def _shared_seconds(size: int, plan: Plan, cluster: Cluster, stage: int) -> float:
    """Seconds to sum the gradients of parameters that other ranks' stages use too: there and
    back.
    """
    if plan.pipeline == 1 or not size:
        return 0.0
    rank = stage % plan.pipeline
    other = device_number(plan, rank - 1 if rank else 1)
    return 2 * send_seconds(cluster, size, device_number(plan, rank), other)


def _stepped(profile: Profile, plan: Plan, works: Sequence[StageWork]) -> tuple[float, int]:
    """(bytes of gradients that a rank's optimizer steps, of how many tensors)."""
    trained, tensors = sum(w.gradient for w in works), sum(w.tensors for w in works)
    if not plan.zero:
        return trained, tensors
    kept = kept_bytes(profile, plan, [(w.first, w.end) for w in works]).trained
    return kept + (trained - kept) / plan.shards, tensors


def _step_seconds(
    gradient: float, tensors: int, cluster: Cluster, optimizer_bytes: int, offload: Sequence[str]
) -> tuple[float, float]:
    """(seconds of the optimizer's step, of copies to and from the host around it)."""
    seconds = _optimizer_seconds(gradient, tensors, cluster, optimizer_bytes)
    if "optimizer" not in offload:
        return seconds, 0.0
    return host_step_seconds(gradient, tensors, optimizer_bytes, cluster, seconds, offload)


def _optimizer_seconds(
    gradient: float, tensors: int, cluster: Cluster, optimizer_bytes: int
) -> float:
    """Read parameter, gradient and state, write parameter and state, at memory bandwidth.

    gradient: bytes of so many tensors."""
    for row in cluster.device.measured:
        if row.op == OPTIMIZER:
            starts, moves = _measured_optimizer(row, cluster.device)
            return cluster.device.stepping * (starts * tensors + moves * gradient)
    traffic = gradient * (3 + 2 * optimizer_bytes / 4)
    device = cluster.device
    launches = tensors if device.name == "cpu" else math.ceil(tensors / _TENSORS_AT_ONCE)
    seconds = traffic / device.memory_bandwidth + launches * _OPTIMIZER_OPS * device.launch_seconds
    return device.stepping * seconds


def _measured_optimizer(row: OpTime, device: Device) -> tuple[float, float]:
    """(seconds for each tensor, for each byte) of a step that was measured: a shard has fewer
    numbers, but as many tensors."""
    starts = min(row.seconds / row.count, _OPTIMIZER_OPS * device.launch_seconds)
    return starts, (row.seconds - row.count * starts) / max(1, row.bytes)


@dataclass(frozen=True)
class LeastMoved:
    """Seconds to reduce all gradients and to gather all parameters over the data axis, of a device;
    scatter: of reducing, what each microbatch does; beside: the share of a phase's seconds, all
    stages together, that they may hide behind, and slows: by how much a phase is longer for a
    second that hides; low: of gathering them in the dtype in which they are read. Numbers, or
    columns of them."""

    reduce: Any
    scatter: Any
    gather: Any
    beside: Any
    low: Any
    slows: Any

    def exposed(self, of: Any, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """What of it makes a step longer, wherever it is cut. of: `planner.bounds.Columns`.
        forward, backward: seconds of a microbatch, all stages."""

        def least(moved: Any, phase: np.ndarray) -> np.ndarray:  # of `exposed_seconds`
            return np.maximum(self.slows * moved, moved - self.beside * phase)

        always, never = (of.again == GATHERS.index(again) for again in (True, False))
        shards = (of.zero >= 2) & of.shards
        gather = np.where(never, self.gather, self.low)
        gathering = np.where(always | never, of.microbatches, 1)
        summing = np.where(shards, of.microbatches, 1)

        def backwards(more: Any) -> np.ndarray:
            before = (summing - 1) * least(self.scatter + more, backward)
            return before + least(self.reduce + more, backward)

        reduces = backwards(0.0)
        again = backwards(gather) + (gathering - summing) * least(gather, backward)
        third = gathering * least(gather, forward) + np.where(always, again, reduces)
        return np.where(of.zero == 3, third, reduces + np.where(of.zero == 0, 0.0, self.gather))


def least_moved(profile: Profile, plan: Plan, cluster: Cluster, extra: int = 1) -> LeastMoved:
    """What moves over the data axis at least. extra: by how much more parameters will be sharded
    than the profile's. It depends on the plan's axes, and on whether ZeRO is 2 or more.

    Gradients may be partial sums over any of the other axes too: over a group with those that is
    all in one node a sum may take less than over data alone.
    """
    if plan.data == 1:
        return LeastMoved(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def seconds(move: Callable[[float], float], size: float) -> float:
        """Latencies are left out where stages may hold nothing that moves."""
        return move(size) if plan.pipeline == 1 else max(0.0, move(size) - move(1))

    def gather(size: float) -> float:
        return all_gather_seconds(cluster, size, plan.shards, plan.stride("data"))

    others = [axis for axis in ("context", "tensor", "expert") if getattr(plan, axis) > 1]
    groups = [axes for n in range(len(others) + 1) for axes in combinations(others, n)]
    groups = groups if plan.zero < 2 else [()]  # shards are summed over the others besides
    width = 2 if plan.precision.reduce in ("bfloat16", "float16") else 4
    trained = profile.trained_bytes / extra / plan.pipeline
    # What is certainly shared: dims that the ranks of ZeRO and of what shards further divide.
    whole = perhaps_kept(profile, plan.shards * extra)
    shared = trained - whole / extra / plan.pipeline
    low = shared / 2 if plan.precision.stream != "float32" else shared

    def summed(axes: tuple[str, ...]) -> float:
        return seconds(lambda size: sum(_bucketed(cluster, size, axes, plan)), trained * width / 4)

    return LeastMoved(
        min(map(summed, groups)),
        seconds(lambda size: _bucketed(cluster, size, (), plan)[0], trained * width / 4),
        seconds(gather, shared),
        0.0 if cluster.device.type == "cpu" else 1 / plan.pipeline,
        seconds(gather, low),
        INTERFERENCE,
    )


def least_optimizer(
    profile: Profile, plan: Plan, cluster: Cluster, optimizer_bytes: int, extra: int = 1
) -> float:
    """Seconds of the optimizer, with copies to and from the host, where every stage has an equal
    part. extra: as in `least_moved`."""
    size = profile.trained_bytes / extra / (plan.shards if plan.zero else 1)
    tensors = profile.trained_tensors
    device, offload = cluster.device, plan.offload
    for row in device.measured:
        if row.op == OPTIMIZER:
            starts, moves = _measured_optimizer(row, device)
            seconds = starts * tensors + moves * size
            break
    else:
        traffic = size * (3 + 2 * optimizer_bytes / 4)
        launches = tensors / (1 if device.name == "cpu" else _TENSORS_AT_ONCE)
        seconds = traffic / device.memory_bandwidth
        seconds += launches * _OPTIMIZER_OPS * device.launch_seconds
    seconds *= device.stepping
    if "optimizer" in offload:
        seconds = sum(host_step_seconds(size, tensors, optimizer_bytes, cluster, seconds, offload))
    return seconds / plan.pipeline


def predict(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    optimizer_bytes: int,
    stepping: Stepping = NOTHING,
    *,
    simulated: bool = True,
) -> Plan:
    """`plan` with its prediction: seconds and memory."""
    seconds = predict_seconds(profile, plan, cluster, optimizer_bytes, simulated=simulated)
    memory = predict_memory(profile, plan, cluster, optimizer_bytes, stepping)
    return replace(plan, prediction=replace(seconds, memory=memory))
