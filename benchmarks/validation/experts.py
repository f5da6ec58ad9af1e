"""Times of systems that train otherwise than ours: what is joined, and of mixtures what is sent,
weighed, turned and started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from benchmarks.validation import latent
from benchmarks.validation.joined import Joined, joined_works
from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.rows import TENSOR_LINK, Run
from benchmarks.validation.state_space import between_bytes
from benchmarks.validation.systems import SCHEDULED
from graphaccel.capture.symbols import BATCH
from graphaccel.kernels.ops.expert_rows import EXCHANGE
from graphaccel.planner.cluster.catalogue import LAUNCH_SECONDS
from graphaccel.planner.cluster.cluster import Cluster, Device
from graphaccel.planner.cluster.communication import all_to_all_seconds, exposed_seconds
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import KINDS, collective_costs_of, sent_bytes
from graphaccel.planner.profile.cost import Sizes, left_source, node_work
from graphaccel.planner.profile.efficiency import Work, seconds_of
from graphaccel.planner.profile.profile import Profile

_EXPERTS = ".experts"  # the module's name in all of them
_ROUTERS = (".gate", ".router")
_MATMULS = (torch.ops.graphaccel.expert_product.default,
             torch.ops.graphaccel.expert_gradient.default)  # fmt: skip
_WEIGHS = frozenset({torch.ops.aten.mul.Tensor, torch.ops.aten._to_copy.default,
                     torch.ops.aten.sum.dim_IntList})  # fmt: skip
# A bias of each expert, times what its rows weigh, in float32, is added behind the second product
# (`TEGroupedMLP._apply_bias`, megatron/core/transformer/moe/experts.py). Operations for each
# expert: a product and a sum, and in backward two products and their sums, and a cast. Bytes of a
# number: of these and of what puts their results together. (forward, backward) each.
_BIAS_STARTS, _BIAS_BYTES = (2, 5), (28, 40)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_BITS = {"float8_e4m3fn": 8, "float4_e2m1fn_x2": 4}


@dataclass(frozen=True)
class Phase:
    """Of a microbatch's forward or backward, on all stages together: how many operations a process
    starts one by one, and works of a device beside which it does."""

    count: float = 0.0
    beside: tuple[tuple[Work, float], ...] = ()


@dataclass(frozen=True)
class Started:
    """What a process starts one by one in a microbatch, on all stages together; sent: seconds of
    sending rows. scheduled: it schedules two microbatches beside each other.

    In forward it waits at each layer for how many rows each expert gets, so it starts beside what
    it starts alone; in backward it knows, and runs ahead beside all of it (Megatron-LM,
    docs/discussions/deepseek-v3-gb200-optimization, "host-device synchronization")."""

    forward: Phase = Phase()
    backward: Phase = Phase()
    sent: float = 0.0
    scheduled: bool = False

    @property
    def count(self) -> float:
        """Operations of both phases."""
        return self.forward.count + self.backward.count

    def waits(self, device: Device, launch: float, scheduled: float = SCHEDULED) -> float:
        """Seconds in which the device waits for the process; launch: seconds to start one on the
        hosts of most devices; on others as much longer as the catalogue says. scheduled: how many
        times as long where it schedules two microbatches beside each other."""
        each = (
            launch * device.launch_seconds / LAUNCH_SECONDS * (scheduled if self.scheduled else 1)
        )
        busy = [
            sum(n * seconds_of(work, device) for work, n in phase.beside) + self.sent / 2
            for phase in (self.forward, self.backward)
        ]
        starts = self.forward.count, self.backward.count
        return sum(max(0.0, each * n - b) for n, b in zip(starts, busy, strict=True))


@dataclass(frozen=True)
class _Call:
    """An operation, what it asks of a device, and how often in each phase; what is made again is
    backward."""

    node: fx.Node
    work: Work
    forward: int
    backward: int

    @property
    def times(self) -> int:
        return self.forward + self.backward


NOTHING_STARTED = Started()


def as_theirs(
    run: Run, profile: Profile, plan: Plan, where: Cluster, launch: float
) -> tuple[Plan, Started]:
    """The plan with the time it takes in the run's system, and what is started one by one there.
    launch: seconds of the process to start an operation."""
    joined = [(each.work, each.times) for each in _joined(run, profile, plan)]
    mixed, started, sent = run.kind in MIXTURES, NOTHING_STARTED, 0.0
    if mixed or run.products:
        plan = _without_others(run, profile, plan, where)
    if mixed and run.system.rows_in_parts:
        plan, sent = _rows_in_parts(run, profile, plan, where)
    if mixed and run.system.started:
        started = _started(run, profile, plan, sent)
    more = started.waits(where.device, launch)
    more += _seconds([*_others_works(run), *joined], where.device)
    asked = [(call.work, call.times) for call in _calls(run, profile, plan)]
    return _longer(plan, more / _seconds(asked, where.device)), started


def works(run: Run, profile: Profile, plan: Plan) -> list[tuple[Work, float]]:
    """What a microbatch asks of a device, all stages together, and how often."""
    calls = *_calls(run, profile, plan), *_joined(run, profile, plan)
    return [*((call.work, call.times) for call in calls), *_others_works(run)]


def _joined(run: Run, profile: Profile, plan: Plan) -> list[Joined]:
    return joined_works(run, len(plan.recompute) / len(profile.block_names))


def _calls(run: Run, profile: Profile, plan: Plan) -> list[_Call]:
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    kinds, first = profile.node_kinds
    ahead = profile.node_forward
    again = profile.recomputation(plan).rows & ahead
    forward = np.bincount(kinds[ahead], minlength=len(first)).tolist()
    behind = np.concatenate([kinds[~ahead], kinds[again]])
    backward = np.bincount(behind, minlength=len(first)).tolist()
    found = [
        _Call(node, work, *times)
        for node, *times in zip(first, forward, backward, strict=True)
        if node.target not in KINDS and not _in_others(node, run)
        for work in _theirs(node, node_work(node, sizes), run)
    ]
    return [call for call in found if call.work.calls or call.work.bytes]


def _theirs(node: fx.Node, work: Work, run: Run) -> list[Work]:
    """What one call asks there. Products of experts are kernels of their own, one for each expert:
    what they read and write does not hide behind what another computes. With both added up 72
    forward and backward products of grouped layers on B200 are told 13 and 12 % off in the mean, 25
    and 30 % with the longer of both (0.9 of the bandwidth; MooreThreads/SimuMax@4dcaae5,
    configs/system, "group_matmul"). They read numbers of so many bits as they multiply."""
    if between := between_bytes(node, run.microbatch * run.sequence):
        return [work, Work(bytes=between, dtype=work.dtype, calls=0)]
    work = replace(work, cast=work.cast * run.system.casts * _cast_share(node, run))
    if not run.system.experts_apart or node.target not in _MATMULS:
        return [work]
    read = 2 * work.count * work.inner * (work.rows + work.columns)
    moved = work.bytes - int(read * (1 - _BITS.get(run.products, 16) / 16))
    return [replace(work, bytes=0), Work(bytes=moved, dtype=work.dtype, calls=0)]


def _cast_share(node: fx.Node, run: Run) -> float:
    """Of what a product has on its left: rows that are gathered in fewer bits are cast before, by
    each rank its own."""
    source = left_source(node) if run.gathered_bits < 16 else None
    gathered = source is not None and source.target is _WAIT
    return 1 / run.tensor if gathered else 1.0


def _seconds(asked: Sequence[tuple[Work, float]], device: Device) -> float:
    return sum(n * seconds_of(work, device) for work, n in asked)


def _started(run: Run, profile: Profile, plan: Plan, sent: float) -> Started:
    """What is in no CUDA graph. A product of experts is started, and then those of each of them
    (`GroupedLinear` of Transformer Engine)."""
    each = MIXTURES[run.kind].experts / run.sharing
    calls = _calls(run, profile, plan)
    own = [call for call in calls if _part(call.node) in run.system.started]

    def starts(call: _Call) -> float:
        own = call.node.target in _MATMULS and call.work.calls > 0
        return 1 + each if own else call.work.calls

    every = *calls, *(joined := _joined(run, profile, plan))
    alike = joined if "rest" in run.system.started else []
    (ahead, behind), turned = _biases(run), _turned(run)
    if "rest" in run.system.started:
        ahead, behind = _both(ahead, turned), _both(behind, turned)
    else:
        behind = _both(behind, replace(turned, count=0.0))
    forward = Phase(
        ahead.count
        + sum(call.forward * starts(call) for call in own)
        + sum(each.forward * each.work.calls for each in alike),
        (*((call.work, call.forward) for call in (*own, *alike) if call.forward), *ahead.beside),
    )
    backward = Phase(
        behind.count
        + sum(call.backward * starts(call) for call in own)
        + sum(each.backward * each.work.calls for each in alike),
        (*((call.work, call.backward) for call in every if call.backward), *behind.beside),
    )
    return Started(forward, backward, sent, run.system.beside_another)


def _part(node: fx.Node) -> str:
    """Of a layer: its "experts", the "router" before them, or the "rest"."""
    module = node.meta.get("module", "")
    if module.endswith(_EXPERTS):
        return "experts"
    return "router" if module.endswith(_ROUTERS) else "rest"


def _rows_in_parts(run: Run, profile: Profile, plan: Plan, where: Cluster) -> tuple[Plan, float]:
    """The plan with the time it takes where each tensor rank sends a part of the rows to their
    experts, and back; ours sends all that it gathered. They are gathered in both. Theirs may go to
    a node once (`System.once_a_node`), and beside another microbatch (`System.beside_another`). And
    seconds of a microbatch in which a device waits for what is sent, on all stages."""
    assert plan.prediction is not None
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    group, ours, sent = collective_costs_of(where, plan).group(("expert",)), 0.0, 0.0
    theirs = sent_once_a_node(run, where) if run.system.once_a_node else where
    for node in profile.nodes:
        if node.target is EXCHANGE:
            size = sent_bytes(node, sizes)
            ours += all_to_all_seconds(where, size, *group)
            sent += all_to_all_seconds(theirs, size / plan.tensor, *group)
    if run.system.beside_another:
        sent = waited_beside_another(run, profile, plan, where, sent)
    parts, spared = plan.prediction, (ours - sent) * plan.microbatches / plan.pipeline
    parts = replace(
        parts, seconds=parts.seconds - spared, communication=parts.communication - spared
    )
    return replace(plan, prediction=parts), sent


def waited_beside_another(
    run: Run, profile: Profile, plan: Plan, where: Cluster, sent: float
) -> float:
    """Seconds of `sent` that a device waits for, where a layer's forward runs beside the backward
    of another microbatch: what its backward sends first goes beside the forward before the experts,
    what both send to experts beside the experts of both, and what its forward sends back beside the
    other's backward before the experts (`TransformerLayerSchedulePlan.run`). Where a process starts
    the router, it waits in the forward for how many rows each expert gets, and starts nothing that
    could run beside what the forward sends. Those microbatches with which a pipeline starts, or
    ends, have none beside them.
    """
    device, calls = where.device, _calls(run, profile, plan)
    beside = [0.0, 0.0, 0.0]
    for call in calls:
        seconds = seconds_of(call.work, device)
        own = _part(call.node) == "experts"
        beside[1 if own else 0] += call.forward * seconds
        beside[1 if own else 2] += call.backward * seconds
    moved, waits = (sent / 4, sent / 2, sent / 4), 0.0
    if "router" in run.system.started:
        moved, waits = (sent / 4, sent / 4, 0.0), sent / 2
    waits += sum(exposed_seconds(device, m, 0.0, b) for m, b in zip(moved, beside, strict=True))
    alone = min(1.0, plan.pipeline / plan.microbatches)
    return alone * sent + (1 - alone) * waits


def sent_once_a_node(run: Run, where: Cluster) -> Cluster:
    """With links between nodes as much faster as fewer rows go over them: a row goes once to each
    node where it has experts, which are anywhere, and from there to each of them."""
    at = next(i for i, link in enumerate(where.links) if link.name != TENSOR_LINK)
    within, outer = where.links[: at + 1], where.links[at + 1 :]
    nodes = -(-run.expert * run.tensor // within[-1].size)
    chosen = MIXTURES[run.kind].chosen
    reached = nodes * (1 - (1 - 1 / nodes) ** chosen)
    faster = [replace(link, bandwidth=link.bandwidth * chosen / reached) for link in outer]
    return replace(where, links=(*within, *faster))


def _in_others(node: fx.Node, run: Run) -> bool:
    """Whether theirs has a call in another kernel, which is there anyhow or is added: rows are
    weighed between the products of their experts, ours behind them (`System.probabilities_inside`);
    or queries and keys are turned (`latent`)."""
    if latent.turns(node, run):
        return True
    if not run.system.probabilities_inside or run.kind not in MIXTURES:
        return False
    values = [a.meta["val"] for a in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    read = max(tensors, key=torch.Tensor.numel, default=None)
    wide = read is not None and read.dim() == 2 and read.shape[1] == MIXTURES[run.kind].rows
    return wide and node.target in _WEIGHS and node.meta.get("module", "").endswith(_EXPERTS)


def _without_others(run: Run, profile: Profile, plan: Plan, where: Cluster) -> Plan:
    """The plan with the time it takes without what theirs has in other kernels, with experts apart,
    and with their casts."""
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    kinds, first = profile.node_kinds
    times = np.bincount(kinds, minlength=len(first)).tolist()
    whole = spared = 0.0
    for node, count in zip(first, times, strict=True):
        if node.target not in KINDS:
            work = node_work(node, sizes)
            seconds = seconds_of(work, where.device)
            theirs = [] if _in_others(node, run) else _theirs(node, work, run)
            whole += count * seconds
            spared += count * (seconds - sum(seconds_of(one, where.device) for one in theirs))
    return _longer(plan, -spared / whole)


def _others_works(run: Run) -> list[tuple[Work, int]]:
    """What kernels of theirs ask of a device that stand for no call of ours alone."""
    turned = _turned(run)
    return [work for phase in (*_biases(run), turned, turned) for work in phase.beside]


def _turned(run: Run) -> Phase:
    """Of turning queries and keys of latent attention, the same in both phases."""
    if not run.system.latent_rotary or not latent.is_latent(run):
        return Phase()
    work = Work(bytes=latent.moved_bytes(run), dtype=run.precision, calls=latent.STARTS)
    return Phase(run.layers * latent.STARTS, ((work, run.layers),))


def _both(one: Phase, other: Phase) -> Phase:
    return Phase(one.count + other.count, (*one.beside, *other.beside))


def _biases(run: Run) -> tuple[Phase, Phase]:
    """Of adding biases to what experts give, forward and backward."""
    if not run.system.weighs_biases:
        return Phase(), Phase()
    mixture = MIXTURES[run.kind]
    numbers = run.microbatch * run.sequence // run.tensor * mixture.chosen * mixture.rows
    layers = sum(mixture.has_experts(n) for n in range(run.layers))
    each = layers * mixture.experts / run.sharing

    def phase(starts: int, size: int) -> Phase:
        work = Work(bytes=size * numbers, dtype="float32", calls=1)
        return Phase(each * starts, ((work, layers),))

    forward, backward = map(phase, _BIAS_STARTS, _BIAS_BYTES)
    return forward, backward


def _longer(plan: Plan, share: float) -> Plan:
    """The plan with a share more of computing."""
    assert plan.prediction is not None
    parts = plan.prediction
    parts = replace(
        parts, seconds=parts.seconds + share * (parts.compute + parts.bubble),
        compute=parts.compute * (1 + share), bubble=parts.bubble * (1 + share),
    )  # fmt: skip
    return replace(plan, prediction=parts)
