"""Times of a system that adds up layers, each of which was traced alone.

vTrain traces the kernels of one layer at a time, with what lies between them, and adds layers up
(arXiv 2312.12391, section III; `parse_traces` and `predict`, src/predictor.py,
VIA-Research/vTrain@f8dda84). No process is ahead of its device when a layer starts: the device
waits for what is started late, and what a layer is behind at its end the next does not make up for.
So of two layers that take the process long and a head that takes the device long, all are long.
Its tracer has kernels wait for one another (`CUPTI_ACTIVITY_KIND_KERNEL`, profiler/cupti.cpp: "all
kernel executions are serialized", CUPTI User's Guide): `GAP` lies between any two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from benchmarks.validation.rows import Run
from graphaccel.capture.symbols import BATCH
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.axis_collectives import KINDS
from graphaccel.planner.profile.cost import Sizes, node_work
from graphaccel.planner.profile.efficiency import NOTHING, Work, gap_seconds, seconds_of
from graphaccel.planner.profile.profile import Profile

Segment = tuple[tuple[Work, ...], int]
GAP = 10e-6  # seconds, as its own times say
_PASSES = 3  # over the scores of a fused loss: read, and their gradient in their place


def segments(profile: Profile, sizes: Sizes, run: Run) -> tuple[Segment, ...]:
    """What a microbatch asks of a device, in the pieces that were traced: (works in their order,
    how often) of a block's forward or backward, and of what lies between blocks. A block that is
    split over devices was traced as one with fewer heads and a narrower inside: what ours has
    beside that (a share of a bias before a sum, copies of what is sent) is left out."""
    kinds, first = profile.node_kinds
    works = [NOTHING if n.target in KINDS else node_work(n, sizes) for n in first]
    put_in = [_put_in(node) for node in first]
    words = run.vocabulary // run.tensor
    lost = [run.tensor > 1 and _of_loss(node, words) for node in first]
    blocks = profile.block_at[profile.node_position].tolist()
    rows = zip(blocks, profile.node_forward.tolist(), kinds.tolist(), strict=True)
    found: Counter[tuple[Work, ...]] = Counter()
    for (block, ahead), own in groupby(rows, key=lambda row: row[:2]):
        numbers = [kind for _, _, kind in own]
        left_out = lost if block < 0 else put_in
        asked = [works[k] for k in numbers if works[k].calls and not left_out[k]]
        if block < 0 and any(lost[k] for k in numbers):
            scores = 2 * run.microbatch * run.sequence * words
            asked.append(Work(bytes=_PASSES * scores // 2, dtype=run.precision))
        if block >= 0 and run.microbatch > 1:
            turned = _turned(run)
            asked = [turned, *asked, *([turned] if ahead else [])]
        found[tuple(asked)] += 1
    return tuple(found.items())


def as_traced(
    run: Run, profile: Profile, plan: Plan, eager: Plan, device: Device
) -> tuple[Plan, tuple[Segment, ...]]:
    """The plan with the time that its pieces take on `device`, and these. plan: of a process that
    takes no time; eager: of the one that there is, whose optimizer it has."""
    assert plan.prediction is not None
    assert eager.prediction is not None
    assert run.system.launch_seconds is not None
    sizes = Sizes({**profile.step.sizes, BATCH: plan.microbatch_size})
    pieces = segments(profile, sizes, run)
    whole = tuple(node_work(n, sizes) for n in profile.nodes if n.target not in KINDS)
    ratio = seconds(pieces, device, run.system.launch_seconds, GAP)
    alone = replace(device, launch_seconds=0.0)
    ratio /= seconds([(whole, 1)], alone, 0.0, gap_seconds(alone))
    parts, optimizer = plan.prediction, eager.prediction.optimizer
    more = (ratio - 1) * (parts.compute + parts.bubble) + optimizer - parts.optimizer
    parts = replace(
        parts, seconds=parts.seconds + more, compute=parts.compute * ratio,
        bubble=parts.bubble * ratio, optimizer=optimizer,
    )  # fmt: skip
    return replace(plan, prediction=parts), pieces


def _turned(run: Run) -> Work:
    """A layer's input, which it copies to have the sequence first, as its result to have it second
    again (`ShardedGptTransformer.forward`, src/model/gpt_modeling.py), and the gradient of that
    once, to be a matrix. Of one sequence both lie alike."""
    numbers = run.microbatch * run.sequence * run.hidden
    return Work(bytes=2 * 2 * numbers, dtype=run.precision)


def _put_in(node: torch.fx.Node) -> bool:
    """Whether sharding added a call, other than one that stands for the model's own."""
    plain = getattr(node.target, "namespace", "") == "aten"
    return plain and node.meta.get("made_by", "").startswith("shard_axis")


def _of_loss(node: torch.fx.Node, words: int) -> bool:
    """Whether a call is of a loss that goes over the scores of each token in many operations."""
    value = node.meta.get("val")
    read = [n.meta.get("val") for n in node.all_input_nodes]
    shapes = [v.shape for v in (value, *read) if isinstance(v, torch.Tensor) and v.dim()]
    if node.target is torch.ops.aten.mm.default:
        return False
    return any(shape[-1] == words and len(shape) < 4 for shape in shapes)


def seconds(pieces: Sequence[Segment], device: Device, launch: float, gap: float) -> float:
    """Of a microbatch. launch: of the process, to start an operation; gap: of the device, between
    two."""
    return sum(
        n * _alone([(w.calls, seconds_of(w, device) + gap * w.calls) for w in own], launch)
        for own, n in pieces
    )


def _alone(calls: Sequence[tuple[int, float]], launch: float) -> float:
    """Seconds until all is done: each call begins when it was started, and what came before it is
    done."""
    started = done = 0.0
    for count, taken in calls:
        started += count * launch
        done = max(done, started) + taken
    return done
