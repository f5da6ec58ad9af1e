"""`Facts`: everything that a report says about a plan, as plain data for text, HTML, JSON and
trace.

Nothing here depends on which axes a mesh has, which decisions there are or what terms a step's time
and memory consist of: they are taken from the plan.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.capture.layers.blocks import block_of
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import SEQUENCE
from graphaccel.ir.program import StepProgram
from graphaccel.ir.replication.unfold import distinct_nodes, input_nodes
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.estimate.estimate import timeline
from graphaccel.planner.estimate.estimated_memory import predict_memory
from graphaccel.planner.estimate.stage_costs import held_parameters, sized_for, stage_costs
from graphaccel.planner.estimate.stage_messages import message_bytes
from graphaccel.planner.estimate.traffic import Traffic, traffic
from graphaccel.planner.explain.answers import Answer, Explanation
from graphaccel.planner.memory.exact_memory import Sample
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.profile.candidate_cuts import stage_positions
from graphaccel.planner.profile.layout_profiles import Layouts
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.report.certainty import (
    Calibration,
    Reserve,
    Room,
    calibration_of,
    reserve_of,
    room_of,
)
from graphaccel.report.format import folded
from graphaccel.report.plain import from_plain, to_plain
from graphaccel.report.throughput import Throughput, throughput_of
from graphaccel.schedule.table import COMPUTING

SCHEMA = 1


@dataclass(frozen=True)
class ModelFacts:
    """The captured model. parameters: number of elements, trained and frozen, shared ones once.
    tensors: how many hold them and the buffers. tokens: length of a sequence, None where there is
    none."""

    name: str
    parameters: int
    tensors: int
    batch: int
    tokens: int | None
    forward_ops: int
    backward_ops: int
    blocks: int
    block_kinds: int


@dataclass(frozen=True)
class StageFacts:
    """One stage. holds: its parameters, folded; bytes: theirs. forward, backward: seconds per
    microbatch. cut: the node after which it ends, in `cut_module`; crossing: bytes that a
    microbatch sends over that cut, one way. blocks: how many begin in it; whole_blocks: none of
    them continues in another stage. recomputed: how many of them are recomputed entirely,
    selectively: except for some saved values; recomputed_first: the former come first.
    """

    stage: int
    rank: int
    tensors: int
    bytes: int
    holds: str
    forward: float
    backward: float
    cut: str = ""
    cut_module: str = ""
    crossing: int = 0
    blocks: int = 0
    whole_blocks: bool = True
    recomputed: int = 0
    selectively: int = 0
    recomputed_first: bool = True


@dataclass(frozen=True)
class Event:
    """An action of a pipeline rank, from `start` to `end` seconds. kind: forward, backward, send,
    receive (the time the rank waits), reduce, optimizer. microbatch and peer: -1 where none."""

    rank: int
    kind: str
    stage: int
    microbatch: int
    peer: int
    direction: str
    start: float
    end: float


@dataclass(frozen=True)
class RankMemory:
    """Bytes on a pipeline rank over a step."""

    rank: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Point:
    """A candidate: seconds of a step and the fullest rank's peak in bytes. front: no other is
    better in both. chosen: it is the plan."""

    name: str
    seconds: float
    peak: int
    fits: bool
    front: bool
    chosen: bool


@dataclass(frozen=True)
class RecomputePrice:
    """The time that recomputation costs in the step, and the bytes a device needs to avoid it."""

    blocks: int
    share: float
    enough: int


@dataclass(frozen=True)
class HeldParameter:
    """State that is sharded over one axis between steps. what: "parameters, gradients, optimizer
    state", "optimizer state", ... tensors: for how many parameters, out of `of`. holds: which, by
    the dim that is sharded, layer numbers folded."""

    axis: str
    size: int
    what: str
    tensors: int
    of: int
    holds: str


@dataclass(frozen=True)
class Measured:
    """A run of the plan: median seconds of `steps` steps, and peak tensor bytes of each pipeline
    rank (none where they could not be measured). where: the machine, in words. host: bytes that
    each pipeline rank holds on its host. optimizer: median seconds of the optimizer's step alone.
    """

    steps: int
    seconds: float
    fastest: float
    slowest: float
    memory: tuple[int, ...]
    where: str
    host: tuple[int, ...] = ()
    optimizer: float = 0.0


@dataclass(frozen=True)
class Facts:
    """The whole report as data.

    room: whether the fullest device has enough memory. reserve: what its allocator is assumed to
    waste. calibration: where its rates come from. throughput: FLOPs of a step and the precision.
    answers: to each `--why-not`, in the order in which they were asked.
    """

    model: ModelFacts
    cluster: Cluster
    assumed: str
    plan: Plan
    stages: tuple[StageFacts, ...]
    events: tuple[Event, ...]
    recompute: RecomputePrice | None = None
    memory: tuple[RankMemory, ...] = ()
    candidates: tuple[Point, ...] = ()
    explanation: Explanation | None = None
    measured: Measured | None = None
    traffic: tuple[Traffic, ...] = ()
    held_parameters: tuple[HeldParameter, ...] = ()
    room: Room | None = None
    calibration: Calibration | None = None
    answers: tuple[Answer, ...] = ()
    reserve: Reserve | None = None
    throughput: Throughput | None = None
    schema: int = SCHEMA

    @property
    def prediction(self) -> Prediction:
        """The plan's prediction. Raises ValueError for a plan without one."""
        if self.plan.prediction is None:
            raise ValueError("this plan was not predicted yet")
        return self.plan.prediction

    def to_json(self) -> str:
        """Stable JSON: sorted keys, bytes as integers, seconds as floats."""
        return json.dumps(to_plain(self), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Facts:
        """Read a report back. Raises ValueError for another schema or unknown fields."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            result = data.get("schema") if isinstance(data, dict) else None
            raise ValueError(f"report schema {result!r}; this version reads {SCHEMA}")
        return from_plain(Facts, data)


def gather(
    plan: Plan,
    step: StepGraph,
    cluster: Cluster,
    *,
    model_name: str,
    assumed: str,
    layouts: Layouts | None = None,
    program: StepProgram | None = None,
) -> Facts:
    """Facts about the plan itself. layouts: profiles of the step and of its shards. program: built
    for the plan: without it sharded state is not reported.

    Raises ValueError for a plan without a prediction, or with axes that `layouts` has no profile
    for.
    """
    if plan.prediction is None:
        raise ValueError("this plan was not predicted yet")
    layouts = layouts or Layouts(Profile(step))
    profile = layouts.of(plan)
    sized = sized_for(profile, plan, cluster)
    return Facts(
        model=_model(step, layouts.whole, model_name, plan.batch),
        cluster=cluster,
        assumed=assumed,
        plan=plan,
        stages=_stages(plan, profile, sized, cluster),
        events=_events(plan, plan.prediction, profile, cluster),
        recompute=_recompute_price(plan, plan.prediction, profile, sized, cluster),
        traffic=traffic(profile, plan, cluster),
        held_parameters=() if program is None else _held_parameters(plan, program),
        room=room_of(plan.prediction.memory, cluster),
        calibration=calibration_of(cluster, plan.precision),
        reserve=reserve_of(cluster),
        throughput=throughput_of(layouts.whole.step, plan, cluster),
    )


_LEVELS = {
    1: "optimizer state",
    2: "gradients and optimizer state",
    3: "parameters, gradients and optimizer state",
}


def _held_parameters(plan: Plan, program: StepProgram) -> tuple[HeldParameter, ...]:
    """State that is sharded between steps, by axis and by which state of a parameter it is."""
    names = {n for stage in program.stages for n in stage.parameters}
    rows: dict[tuple[str, int], list[tuple[str, int]]] = defaultdict(list)
    for name in sorted(names):
        for split in program.parameter_shards.get(name, ()):
            rows[split.axis, 3].append((name, split.dim))
        owned = program.owned.get(name)
        if owned is not None and owned.level < 3:
            rows[owned.split.axis, owned.level].append((name, owned.split.dim))
    results = []
    for (axis, level), held in rows.items():
        dims = sorted({dim for _, dim in held})
        by_dim = (f"dim {d}: {folded([n for n, dim in held if dim == d])}" for d in dims)
        results.append(
            HeldParameter(
                axis, plan.ranks(axis), _LEVELS[level], len(held), len(names), "; ".join(by_dim)
            )
        )
    order = ("tensor", "context", "expert", "shard", "data")
    return tuple(sorted(results, key=lambda row: (order.index(row.axis), row.what)))


def run_spans(facts: Facts) -> dict[tuple[str, int, int], tuple[float, float]]:
    """(start, end) of each forward and backward, by (kind, stage, microbatch)."""
    return {
        (e.kind, e.stage, e.microbatch): (e.start, e.end)
        for e in facts.events
        if e.kind in COMPUTING
    }


def points(plans: Sequence[Plan], chosen: Plan, cluster: Cluster) -> tuple[Point, ...]:
    """Every candidate, by ascending seconds; the chosen plan is among them. Of two predictions of
    the same candidate the later one is used."""
    rows = {plan.decided(): (_seconds(plan), _peak(plan), plan_name(plan)) for plan in plans}
    rows[chosen.decided(notes=())] = (_seconds(chosen), _peak(chosen), plan_name(chosen))
    best = chosen.decided(notes=())
    result, lowest = [], None
    for key, (seconds, peak, name) in sorted(rows.items(), key=lambda row: row[1]):
        front = lowest is None or peak < lowest
        lowest = peak if front else lowest
        fits = peak <= cluster.device.memory
        result.append(Point(name, seconds, peak, fits, front, key == best))
    return tuple(result)


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.seconds


def _peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(m.peak for m in plan.prediction.memory)


def _model(step: StepGraph, profile: Profile, name: str, batch: int) -> ModelFacts:
    ops: Counter[str | None] = Counter()
    for node, count in distinct_nodes(step.graph):
        ops[node.meta.get("phase")] += count if node.op == "call_function" else 0
    return ModelFacts(
        name=name,
        parameters=_count(profile, step),
        tensors=len(profile.parameters),
        batch=batch,
        tokens=step.sizes.get(SEQUENCE),
        forward_ops=sum(n for phase, n in ops.items() if phase != "backward"),
        backward_ops=ops["backward"],
        blocks=len(step.blocks),
        block_kinds=len({block.kind for block in step.blocks}),
    )


def _count(profile: Profile, step: StepGraph) -> int:
    """Trained and frozen elements, shared ones once."""
    known = {p.name for p in profile.parameters}
    sizes = {}
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        name = step.tied.get(spec.name, spec.name)
        if spec.kind == "parameter" and name in known:
            sizes[name] = node.meta["val"].numel()
    return sum(sizes.values())


def _stages(
    plan: Plan, profile: Profile, sized: SizedProfile, cluster: Cluster
) -> tuple[StageFacts, ...]:
    costs = stage_costs(profile, sized, plan, cluster.device.launch_seconds)
    spans = stage_positions(profile, plan.cuts)
    inside = [_blocks(profile, span) for span in spans]
    sent = message_bytes(profile, sized, plan)
    results = []
    for stage, (span, work) in enumerate(zip(spans, costs, strict=True)):
        elsewhere = {b for other in (*inside[:stage], *inside[stage + 1 :]) for b in other}
        own = [b for b in inside[stage] if not any(b in before for before in inside[:stage])]
        names = [profile.block_names[b] for b in own]
        full = [plan.recomputed.get(name) == () for name in names]
        held = held_parameters(profile, [span])
        cut = plan.cuts[stage] if stage < len(plan.cuts) else ""
        module = profile.modules[profile.position[cut]] if cut else ""
        results.append(
            StageFacts(
                stage=stage,
                rank=stage % plan.pipeline,
                tensors=len(held),
                bytes=sum(p.bytes for p in held),
                holds=fold([p.name for p in held]),
                forward=work.forward,
                backward=work.backward,
                cut=cut,
                cut_module=(module or "the model's own code") if cut else "",
                crossing=sum(
                    size
                    for (a, b, way), size in sent.items()
                    if way == "forward" and a <= stage < b
                ),
                blocks=len(own),
                whole_blocks=not elsewhere & set(inside[stage]),
                recomputed=sum(full),
                selectively=sum(bool(plan.recomputed.get(name)) for name in names),
                recomputed_first=full == sorted(full, reverse=True),
            )
        )
    return tuple(results)


def _blocks(profile: Profile, span: tuple[int, int]) -> list[int]:
    """The blocks that positions [first, end) belong to, in order."""
    first, end = span
    return list(dict.fromkeys(b for b in profile.block_at[first:end].tolist() if b >= 0))


def _events(
    plan: Plan, prediction: Prediction, profile: Profile, cluster: Cluster
) -> tuple[Event, ...]:
    schedule, played = timeline(profile, plan, cluster)
    results = [
        Event(rank, a.kind, a.stage, a.microbatch, a.peer, a.direction, start, end)
        for rank, (actions, spans) in enumerate(zip(schedule, played.spans, strict=True))
        for a, (start, end) in zip(actions, spans, strict=True)
    ]
    if prediction.optimizer:
        start = max(played.makespan, prediction.seconds - prediction.optimizer)
        for rank in range(len(schedule)):
            end = start + prediction.optimizer
            results.append(Event(rank, "optimizer", rank, -1, -1, "", start, end))
    return tuple(results)


def _recompute_price(
    plan: Plan, prediction: Prediction, profile: Profile, sized: SizedProfile, cluster: Cluster
) -> RecomputePrice | None:
    """The cost of recomputation, and the memory from which it would not be needed."""
    if not plan.recomputed or not prediction.memory:
        return None
    seconds = sized.recompute_seconds(profile.recomputation(plan))[0].sum()
    share = float(seconds) * plan.microbatches / plan.pipeline / prediction.seconds
    spans = stage_positions(profile, plan.cuts)[:: plan.pipeline]  # of rank 0
    trained = sum(p.bytes for p in held_parameters(profile, spans) if p.trainable)
    state = round(4 * prediction.memory[0].optimizer / trained) if trained else 0
    kept = predict_memory(profile, plan.decided(recompute=(), selective=()), cluster, state)
    return RecomputePrice(len(plan.recomputed), share, max(k.peak for k in kept))


def fold(names: Sequence[str], *, parameters: bool = True) -> str:
    """Names in short form: parameters by block or module, consecutive blocks as `h.0-3`."""
    groups: dict[str, None] = {}
    for name in names:
        module = name.rpartition(".")[0] or name
        groups[block_of(name) or (module if parameters else name)] = None
    folded: list[str] = []
    last: tuple[str, int] | None = None
    for group in groups:
        stem, _, number = group.rpartition(".")
        if number.isdigit():
            if last == (stem, int(number) - 1):
                start = folded[-1].removeprefix(f"{stem}.").split("-")[0]
                folded[-1] = f"{stem}.{start}-{number}"
            else:
                folded.append(group)
            last = (stem, int(number))
        else:
            folded.append(group)
            last = None
    return ", ".join(folded)
