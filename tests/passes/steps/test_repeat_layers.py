"""Programs of deep models are made of few layers, and are those that all layers give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import without_data
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.compiler.programs import build
from graphaccel.compiler.schedules import schedule_of
from graphaccel.ir.program import StageProgram, StepProgram
from graphaccel.ir.replication.unfold import distinct_nodes, node_names, unfolded_from
from graphaccel.ir.text import graph_text
from graphaccel.ir.values import module_path
from graphaccel.passes import adapters
from graphaccel.passes.replication import replicated
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.memory.exact_memory import rank_memory
from graphaccel.planner.memory.resident import Resident
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import StageMemory
from graphaccel.planner.profile.axis_collectives import collective_costs_of
from graphaccel.planner.profile.profile import Profile
from tests.support.gpt import GPT

LAYERS = 6
MORE = 13


def captured(layers: int) -> StepGraph:
    fake = without_data(GPT(layers=layers, width=64))
    with next(fake.parameters()).fake_mode:
        ids = torch.empty(8, 8, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    step = capture(fake, flatten_call((), batch), many=4)
    assert step.repeats is not None
    return step


@pytest.fixture(scope="module")
def deep() -> StepGraph:
    return captured(LAYERS)


@pytest.fixture(scope="module")
def deeper() -> StepGraph:
    return captured(MORE)


def texts(program: StepProgram) -> list[str]:
    graphs = [g for stage in program.stages for g in stage.graphs]
    return [graph_text(g.graph, notes=True) for g in graphs]


def said(program: StepProgram) -> list[object]:
    """Everything that a program says besides its graphs."""
    values = [
        (s.forward_inputs, s.forward_outputs, s.backward_inputs, s.backward_outputs,
         s.weight_inputs, s.weight_outputs, s.prepare_inputs, s.prepare_outputs, s.parameters,
         s.buffers, s.groups, s.reduced, s.buckets)
        for s in program.stages
    ]  # fmt: skip
    names = (
        "parameter_shards partial owned unsharded output_places random loss_partial shared".split()
    )
    return [values, *(getattr(program, name) for name in names)]


def memory(program: StepProgram, plan: Plan) -> list[StageMemory]:
    names = [n for s in program.stages for n in s.parameters]
    held = dict.fromkeys(names, 64)
    resident = Resident(held, {}, held, 100, 2.0)
    schedule = schedule_of(plan, program)
    return [rank_memory(program, schedule, rank, resident) for rank in range(plan.pipeline)]


def whole(step: StepGraph) -> StepGraph:
    """The step as if all layers had been captured."""
    return replace(step, repeats=None)


def columns(profile: Profile, cluster: Cluster, plan: Plan) -> list[object]:
    """Everything a profile knows of its nodes, but for which node stands for which."""
    storages, sized = (
        profile.storages,
        profile.sized(3, cluster.device, collective_costs=collective_costs_of(cluster, plan)),
    )
    lines, kept = profile.lines, profile.saved(profile.saving({1: (), 4: ()}))
    arrays = [
        lines.place, lines.reader, lines.source, lines.inputs, lines.results, profile.block_at,
        profile.node_weight, profile.node_forward, *storages.uses, *kept, profile.crossing.storage,
        *profile.crossing.uses, sized.forward, sized.backward, sized.weight, sized.sent_backward,
        sized.host_backward, sized.bytes, sized.passing_forward, sized.passing_backward,
        sized.gradients,
    ]  # fmt: skip
    for name in "row at ahead value input common kept released floating gradient".split():
        arrays.append(getattr(storages, name))
    plain = [profile.modules, profile.parameters, profile.partial, profile.block_names]
    return [*plain, sized.batch_bytes, sized.launches, *(a.tolist() for a in arrays)]


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"tensor": 2, "context": 2}], ids=str)
def test_profiles_are_those_of_all_layers(axes: dict[str, int], deep: StepGraph) -> None:
    """Unfolded from few layers, column by column what the whole graph gives."""
    where = cluster("h100-80gb", 4)
    plan = Plan(4, batch=16, sequence=False, **axes)  # 8: what is cheapest differs with the depth
    whole = replace(deep, repeats=None)
    if not axes:
        few, all_layers = Profile(deep), Profile(whole)
    else:
        made = [sharded_graph(step, plan, deep.sizes) for step in (deep, whole)]
        assert made[0].lines is not None
        assert made[1].lines is None
        few, all_layers = (Profile(m.step, m.partial, m.lines) for m in made)
    assert len(few.lines.nodes) < len(few.lines.of) == len(all_layers.lines.nodes)
    for mine, theirs in zip(
        columns(few, where, plan), columns(all_layers, where, plan), strict=True
    ):
        assert mine == theirs


ALL = tuple(f"blocks.{n}" for n in range(LAYERS))


@pytest.mark.parametrize(
    ("plan", "programs"),
    [
        (Plan(4, data=2, tensor=2, zero=3, microbatches=2, batch=8, sequence=False), True),
        (Plan(2, data=2, microbatches=2, batch=8, zero=3, reshard_after_forward="never"), True),
        (
            Plan(2, data=2, microbatches=2, batch=8, zero=3, reshard_after_forward="once_per_step"),
            True,
        ),
        (Plan(1, microbatches=2, batch=8, precision=PRECISIONS["bf16"], cast_once=True), True),
        (Plan(2, data=2, microbatches=2, batch=8, recompute=ALL), True),
        (Plan(2, data=2, microbatches=2, batch=8, recompute=("blocks.1", "blocks.4")), False),
    ],
    ids=lambda value: plan_name(value) if isinstance(value, Plan) else "",
)
def test_programs_are_those_of_all_layers(
    plan: Plan, programs: bool, deep: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded: list[int] = []
    repeated: list[StageProgram] = []
    real, again = adapters.shard_axes, replicated.repeat_programs

    def noting(*args):  # type: ignore[no-untyped-def]
        repeated.append(again(*args))
        return repeated[-1]

    monkeypatch.setattr(replicated, "repeat_programs", noting)

    def counting(graph, step, *rest, **more):  # type: ignore[no-untyped-def]
        sharded.append(len(step.blocks))
        return real(graph, step, *rest, **more)

    monkeypatch.setattr(adapters, "shard_axes", counting)
    few = build(replace(deep), plan, sizes=deep.sizes)
    assert sharded == [3, 4]
    assert bool(repeated) == programs
    sharded.clear()
    full = build(whole(deep), plan, sizes=deep.sizes)
    assert sharded == [LAYERS]
    assert_same(few, full, plan)


@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 3, "accumulation": "shards"},
     {"microbatches": 2, "reshard_after_forward": "once_per_step"}],
    ids=str,
)  # fmt: skip
def test_planning_makes_no_node_of_the_layers_that_repeat(options: dict[str, Any]) -> None:
    """And counts the same bytes, and tells the same names, as on the nodes."""
    step = captured(MORE)
    plan = Plan(2, data=2, zero=3, batch=12, **options)
    fingerprint = step.fingerprint
    Profile(step)
    program = build(step, plan, sizes=step.sizes)
    counted = memory(program, plan)
    graphs = [step.graph, step.forward.graph, *(g for s in program.stages for g in s.graphs)]
    assert all(unfolded_from(graph) is not None for graph in graphs)
    known = [(node_names(g), sum(n for _, n in distinct_nodes(g)) + 1) for g in graphs]
    for graph, (names, count) in zip(graphs, known, strict=True):
        assert names == [node.name for node in graph.graph.nodes]
        assert count == len(graph.graph.nodes)
        assert unfolded_from(graph) is None
    assert counted == memory(program, plan)
    assert fingerprint == whole(step).fingerprint
    assert_same(program, build(whole(step), plan, sizes=step.sizes), plan)


def test_buckets_that_span_layers_are_as_large_as_all_layers_tell(deeper: StepGraph) -> None:
    """Sums of few layers would be put into other buckets."""
    plan = Plan(2, data=2, microbatches=2, batch=8, zero=2)
    few = build(deeper, plan, sizes=deeper.sizes)
    assert len(few.stages[0].reduced) < MORE
    assert_same(few, build(whole(deeper), plan, sizes=deeper.sizes), plan)


def assert_same(few: StepProgram, full: StepProgram, plan: Plan) -> None:
    assert texts(few) == texts(full)
    assert said(few) == said(full)
    assert memory(few, plan) == memory(full, plan)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(4, data=2, tensor=2, zero=3, microbatches=3, batch=12,
             accumulation="shards", recompute=tuple(f"blocks.{n}" for n in range(6))),
        Plan(2, data=2, microbatches=2, batch=8,
             recompute=("blocks.0", *(f"blocks.{n}" for n in range(7, 13)))),
    ],
    ids=plan_name,
)  # fmt: skip
def test_rows_of_layers_that_are_treated_alike(
    plan: Plan, deeper: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten: list[int] = []
    real = adapters.recompute

    def counting(graph, plan, positions):  # type: ignore[no-untyped-def]
        rewritten.append(len(plan.recompute))
        return real(graph, plan, positions)

    monkeypatch.setattr(adapters, "recompute", counting)
    monkeypatch.setattr(replicated, "is_less_work", lambda *_: True)
    few = build(deeper, plan, sizes=deeper.sizes)
    assert len(rewritten) == 3
    assert_same(few, build(whole(deeper), plan, sizes=deeper.sizes), plan)


def ends(step: StepGraph, layers: Sequence[int]) -> tuple[str, ...]:
    """The last nodes of some layers."""
    last = {}
    for node in step.forward.graph.graph.nodes:
        last[node.meta.get("module") or module_path(node)] = node.name
    return tuple(last[f"blocks.{n}"] for n in layers)


@pytest.mark.parametrize(
    "options",
    [
        {"data": 2, "zero": 3, "recompute": tuple(f"blocks.{n}" for n in (2, 4, 6, 9))},
        {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step"},
        {"precision": PRECISIONS["bf16"], "cast_once": True},
        {"tensor": 2, "sequence": False, "schedule": "zero_bubble"},
        {"data": 2, "interleave": 2, "schedule": "interleaved"},
    ],
    ids=lambda options: "-".join(options),
)
def test_equal_stages_are_rewritten_once(
    options: dict[str, Any], deeper: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = 6 * options.get("data", 1) * options.get("tensor", 1) // options.get("interleave", 1)
    plan = Plan(
        devices, pipeline=6 // options.get("interleave", 1), microbatches=6, batch=24,
        cuts=ends(deeper, range(1, 11, 2)), **options,
    )  # fmt: skip
    kinds: list[int] = []
    real = adapters.split_phases

    def counting(staged, outlines):  # type: ignore[no-untyped-def]
        kinds.append(len(outlines))
        return real(staged, outlines)

    monkeypatch.setattr(adapters, "split_phases", counting)
    few = build(deeper, plan, sizes=deeper.sizes)
    monkeypatch.setattr(replicated, "equal_stages", lambda *_: {})
    full = build(deeper, plan, sizes=deeper.sizes)
    assert kinds == [4 if plan.recompute else 3, 6]
    assert_same(few, full, plan)
