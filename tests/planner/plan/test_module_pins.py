"""Pins that speak of parts of a model: the axis of its vocabulary, the stages of its layers."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.errors import BadPin
from graphaccel.ir.program import Sharded
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.placement.solve_axes import Request, solve_axes
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.module_pins import is_inside, replicate, shard, vocabulary
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.read_pins import read_pins
from graphaccel.planner.plan.zero import owned_shards
from graphaccel.planner.profile.candidate_cuts import stage_positions
from graphaccel.planner.profile.layout_profiles import rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.search import search

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt", {"token.weight": 0}),
        ("gpt2", {"transformer.wte.weight": 0}),
        ("llama", {"model.embed_tokens.weight": 0, "lm_head.weight": 0}),
        ("bert", {"bert.embeddings.word_embeddings.weight": 0}),
        ("resnet", {}),
    ],
)
def test_what_the_vocabulary_is(captured: Captured, name: str, words: dict[str, int]) -> None:
    assert {n: dim for n, (_, dim) in vocabulary(captured(name)).items()} == words


def test_a_vocabulary_split_by_words(captured: Captured, made_up: MadeUp) -> None:
    step = captured("llama")
    pins = read_pins({"vocab": "tensor", "tensor": 2}, step, 2, 8, Limits())
    plan = Plan(2, tensor=2, batch=8, placements=pins.placements)
    request = Request(replace(plan, rates=rates_of(made_up(2), plan)))
    made = solve_axes(step.graph, step, request).local
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert made.parameter_shards[name] == (Sharded("tensor", 0),)


def test_a_vocabulary_on_the_data_axis(captured: Captured, made_up: MadeUp) -> None:
    """Whole on the tensor axis, a shard on each data rank; a pin of one's own comes first."""
    step, own = captured("llama"), {"lm_head.weight": shard(0, "tensor")}
    pins = read_pins(
        {"vocab": "data", "tensor": 2, "data": 2, "placements": own}, step, 4, 8, Limits()
    )
    plan = Plan(4, tensor=2, data=2, batch=8, placements=pins.placements)
    request = Request(replace(plan, rates=rates_of(made_up(4), plan)))
    made = solve_axes(step.graph, step, request).local
    assert "model.embed_tokens.weight" not in made.parameter_shards
    assert made.parameter_shards["lm_head.weight"] == (Sharded("tensor", 0),)
    owned, _ = owned_shards(step, plan, made.parameter_shards)
    assert list(owned) == ["model.embed_tokens.weight"]
    assert owned["model.embed_tokens.weight"].level == 3


def test_a_module_stands_for_its_parameters(captured: Captured) -> None:
    """ZeRO by module: of one that is pinned to the data axis, parameters rest in shards; of one
    that is pinned to be whole, nothing is sharded; a parameter's own pin comes first."""
    step, given = captured("gpt"), {"data": 2, "pipeline": 1}
    some = {"blocks.1": shard(0, "data"), "blocks.1.up": replicate()}
    pins = read_pins({**given, "placements": some, "zero": 0}, step, 2, 8, Limits())
    owned, _ = owned_shards(step, Plan(2, data=2, batch=8, placements=pins.placements), {})
    inside = {n for n in step.trainable if n.startswith("blocks.1.") and ".up." not in n}
    assert set(owned) == inside
    assert {o.level for o in owned.values()} == {3}
    pins = read_pins(
        {**given, "placements": {"blocks": replicate()}, "zero": 3}, step, 2, 8, Limits()
    )
    owned, _ = owned_shards(step, Plan(2, data=2, zero=3, batch=8, placements=pins.placements), {})
    assert owned
    assert not any(name.startswith("blocks.") for name in owned)


@pytest.mark.parametrize(
    ("stages", "pipeline"),
    [({"blocks.1": 1}, 2), ({"blocks.2": 0}, 2), ({"blocks.0": 1, "blocks.3": 2}, 4)],
)
def test_layers_are_on_their_stages(
    captured: Captured, made_up: MadeUp, stages: dict[str, int], pipeline: int
) -> None:
    step = captured("gpt")
    pins = {"stage_of": stages, "pipeline": pipeline, "interleave": 1, "microbatches": 4}
    plan = search(step, made_up(pipeline, 1 << 20), pins=pins, optimizer_bytes=8)
    profile = Profile(step)
    for path, stage in stages.items():
        first, end = stage_positions(profile, plan.cuts)[stage]
        inside = [at for at, module in enumerate(profile.modules) if is_inside(module, path)]
        assert inside
        assert first <= min(inside) <= max(inside) < end
    assert "stage_of" in plan.pinned


def test_the_search_makes_as_many_stages_as_are_named(captured: Captured, made_up: MadeUp) -> None:
    plan = search(
        captured("gpt"), made_up(2, 1 << 20), pins={"stage_of": {"blocks.3": 1}}, optimizer_bytes=8
    )
    assert plan.stages > 1


def test_a_stage_beyond_the_ranks_asks_for_several_on_each(
    captured: Captured, made_up: MadeUp
) -> None:
    pins = {"stage_of": {"blocks.2": 3}, "pipeline": 2, "microbatches": 4}
    plan = search(captured("gpt"), made_up(2, 1 << 20), pins=pins, optimizer_bytes=8)
    assert plan.stages > 3
    profile = Profile(captured("gpt"))
    first, end = stage_positions(profile, plan.cuts)[3]
    inside = [at for at, module in enumerate(profile.modules) if is_inside(module, "blocks.2")]
    assert first <= min(inside) <= max(inside) < end


@pytest.mark.parametrize(
    ("name", "pins", "text"),
    [
        ("gpt", {"vocab": "expert"}, "vocab='expert' can not be planned\n  why:  unknown\n  help: use one of:  vocab='data'  vocab='tensor'"),
        ("resnet", {"vocab": "tensor", "tensor": 2}, "vocab='tensor' can not be planned\n  why:  nothing is looked up by rows (aten.embedding): the model has no vocabulary\n  help: leave vocab out and it will be chosen for you"),
        ("gpt", {"vocab": "tensor"}, "vocab='tensor' can not be planned\n  why:  token.weight is to be sharded over tensor, which has one device\n  help: leave vocab out and it will be chosen for you"),
        ("gpt", {"vocab": "data", "data": 5}, "vocab='data' can not be planned\n  why:  no dim of token.weight [96, 32] can be shared evenly by data 5\n  help: leave vocab out and it will be chosen for you"),
        ("gpt", {"stage_of": "blocks.1"}, "stage_of='blocks.1' can not be planned\n  why:  it maps paths of modules to their stage\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"block.1": 0}}, "stage_of={'block.1': 0} can not be planned\n  why:  no op belongs to block.1; there is blocks.1\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": -1}}, "stage_of={'blocks.1': -1} can not be planned\n  why:  a stage is a number from 0 on\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.3": 0, "blocks.1": 1}}, "stage_of={'blocks.1': 1, 'blocks.3': 0} can not be planned\n  why:  blocks.1 runs before blocks.3, so it can not be on a later stage\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": 0, "blocks.1.norm_1": 1}}, "stage_of={'blocks.1': 0, 'blocks.1.norm_1': 1} can not be planned\n  why:  blocks.1 still runs when blocks.1.norm_1 does, so both are on one stage\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": 8}, "pipeline": 2}, "stage_of={'blocks.1': 8} can not be planned\n  why:  blocks.1 is to be on stage 8, and there are 8 at most, from 0 on\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": 3}, "pipeline": 2, "schedule": "1f1b"}, "stage_of={'blocks.1': 3} can not be planned\n  why:  blocks.1 is to be on stage 3, and there are 2, from 0 on\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": 5}, "pipeline": 5, "interleave": 1}, "stage_of={'blocks.1': 5} can not be planned\n  why:  blocks.1 is to be on stage 5, and there are 5, from 0 on\n  help: leave stage_of out and it will be chosen for you"),
        ("gpt", {"stage_of": {"blocks.1": 1}, "cuts": ["add_4"]}, "stage_of={'blocks.1': 1} can not be planned\n  why:  cuts= says already where stages end\n  help: leave stage_of out and it will be chosen for you"),
    ],
)  # fmt: skip
def test_pins_that_can_not_hold(
    captured: Captured, name: str, pins: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadPin) as caught:
        read_pins(pins, captured(name), 10, 50, Limits())
    assert str(caught.value) == f"error[GA202]: {text}\n  explain: graphaccel explain GA202"


def test_layers_for_which_no_cuts_do(captured: Captured, made_up: MadeUp) -> None:
    pins = {
        "stage_of": {"blocks.1": 0, "blocks.2": 3},
        "pipeline": 4,
        "microbatches": 4,
        "interleave": 1,
    }
    with pytest.raises(BadPin) as caught:
        search(captured("gpt"), made_up(4, 1 << 20), pins=pins, optimizer_bytes=8)
    assert (
        str(caught.value)
        == """\
error[GA202]: stage_of={'blocks.1': 0, 'blocks.2': 3} can not be planned
  why:  no 3 cuts make 4 stages with these modules on theirs
  help: leave stage_of out and it will be chosen for you
  explain: graphaccel explain GA202"""
    )


def test_the_op_that_refuses_a_pin(captured: Captured, made_up: MadeUp) -> None:
    step = captured("gpt")
    plan = Plan(2, tensor=2, batch=8, placements=(("norm.weight", (Sharded("tensor", 0),)),))
    with pytest.raises(BadPin) as caught:
        sharded_graph(step, replace(plan, rates=rates_of(made_up(2), plan)))
    assert caught.value.reason == (
        "dim 0 of norm.weight [32] can not be sharded over tensor 2: aten.native_layer_norm.default "
        "in norm has no rule for a part of it (its operands: [13, 16, 32], [32], [32])"
    )
