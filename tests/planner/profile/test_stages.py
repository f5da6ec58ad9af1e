"""Candidate cuts, and the best of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.programs import build
from graphaccel.errors import TooManyStages
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import candidate_cuts, stage_positions
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.profile.stages import (
    Chain,
    Room,
    StageLimit,
    choose_cuts,
    partition,
    split_evenly,
)

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


def sized(step: StepGraph, cluster: Cluster) -> tuple[Profile, SizedProfile]:
    profile = Profile(step)
    return profile, profile.sized(2, cluster.device)


@st.composite
def chains(draw: st.DrawFn) -> tuple[np.ndarray, int, np.ndarray | None]:
    """(cost of every segment, stages, allowed or None) of a chain of 2 to 8 pieces."""
    pieces = draw(st.integers(2, 8))
    stages = draw(st.integers(1, pieces))
    work = draw(st.lists(st.integers(1, 20), min_size=pieces, max_size=pieces))
    message = [0, *draw(st.lists(st.integers(0, 5), min_size=pieces - 1, max_size=pieces - 1)), 0]
    total = np.concatenate([[0], np.cumsum(work)]).astype(float)
    cost = total[None, :] - total[:, None] + np.add.outer(message, message)
    if not draw(st.booleans()):
        return cost, stages, None
    flags = draw(st.lists(st.booleans(), min_size=stages * cost.size, max_size=stages * cost.size))
    return cost, stages, np.array(flags).reshape(stages, *cost.shape)


def brute_force(
    cost: np.ndarray, stages: int, allowed: np.ndarray | None
) -> tuple[float, float] | None:
    """(largest, sum of squares) of the best split, by trying all."""
    points = cost.shape[0]
    best = None
    for inner in combinations(range(1, points - 1), stages - 1):
        segments = list(pairwise([0, *inner, points - 1]))
        if allowed is not None and not all(allowed[s, i, j] for s, (i, j) in enumerate(segments)):
            continue
        costs = [cost[i, j] for i, j in segments]
        key = (max(costs), sum(c * c for c in costs))
        best = key if best is None else min(best, key)
    return best


@given(chains())
@settings(max_examples=200, deadline=None)
def test_the_split_is_the_best_there_is(chain: tuple) -> None:
    cost, stages, allowed = chain
    splits = partition(cost, stages, allowed)
    expected = brute_force(cost, stages, allowed)
    if expected is None:
        assert splits is None
        return
    assert splits is not None
    costs = [cost[i, j] for i, j in pairwise(splits)]
    assert (max(costs), sum(c * c for c in costs)) == pytest.approx(expected)


@st.composite
def lines(draw: st.DrawFn) -> tuple[Chain, int, Room, StageLimit]:
    """A chain of 2 to 30 pieces of unlike work, and room for its segments."""
    pieces = draw(st.integers(2, 30))

    def column(least: int, most: int, length: int = pieces) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(least, most), min_size=length, max_size=length)))

    work = np.concatenate([[0], np.cumsum(column(0, 20))]) / 7
    message = np.concatenate([[0], column(0, 5, pieces - 1), [0]]) / 7
    room = Room.__new__(Room)
    room.held = np.concatenate([[0.0], np.cumsum(column(0, 4))])
    room.waiting = np.concatenate([[0.0], np.cumsum(column(0, 4))])
    room.passing = column(0, 9)
    stages = draw(st.integers(1, pieces))
    limit = StageLimit(1.5, tuple(column(1, 4, stages)), tuple(column(5, 60, stages)))
    return Chain(np.arange(pieces + 1), work, message), stages, room, limit


@given(lines())
@settings(max_examples=200, deadline=None)
def test_near_segments_give_the_split_of_all(line: tuple) -> None:
    chain, stages, room, limit = line
    assert split_evenly(chain, stages) == partition(chain.table, stages)
    points = len(chain.ends)
    allowed = np.zeros((stages, points, points), dtype=bool)
    for i, j in combinations(range(points), 2):
        for stage in range(stages):
            held = (room.held[j] - room.held[i]) * limit.per_parameter_byte
            held += room.passing[i:j].max()
            waiting = (room.waiting[j] - room.waiting[i]) * limit.in_flight[stage]
            allowed[stage, i, j] = held + waiting <= limit.budget[stage]
    found = split_evenly(chain, stages, room, limit)
    assert found == partition(chain.table, stages, allowed)


def test_gpt_is_cut_where_only_the_residual_stream_crosses(
    captured: Captured, made_up: MadeUp
) -> None:
    profile, two = sized(captured("gpt"), made_up(2))
    found = candidate_cuts(profile, two)
    names = [profile.names[p] for p in found.positions]
    assert names == ["embedding", "add", *(f"add_{i}" for i in range(1, 9))]
    assert set(found.bytes) == {2 * 16 * 32 * 4}  # [2, 16, 32] float32


def test_the_encoder_output_crosses_every_cut_of_the_decoder(
    captured: Captured, made_up: MadeUp
) -> None:
    profile, two = sized(captured("t5"), made_up(2))
    found = candidate_cuts(profile, two)
    stream, encoded = 2 * 12 * 32 * 4, 2 * 16 * 32 * 4
    bias = 4 * 12 * 12 * 4  # relative positions, computed in the first block from a parameter
    decoder = [
        size
        for p, size in zip(found.positions, found.bytes, strict=True)
        if profile.modules[p].startswith("decoder.block.1")
    ]
    assert decoder
    assert all(size >= stream + encoded for size in decoder)
    assert stream + encoded + bias in decoder


def test_cuts_balance_seconds_not_nodes(captured: Captured, made_up: MadeUp) -> None:
    profile, two = sized(captured("gpt"), made_up(2))
    cuts = choose_cuts(profile, two, 2, 0.0, 0.0)
    assert cuts is not None
    seconds = two.forward + two.backward
    halves = [float(seconds[a:b].sum()) for a, b in stage_positions(profile, cuts)]
    assert max(halves) < 0.55 * sum(halves)
    others = [
        max(float(seconds[: p + 1].sum()), float(seconds[p + 1 :].sum()))
        for p in candidate_cuts(profile, two).positions
    ]
    assert max(halves) == pytest.approx(min(others))


def test_dear_messages_move_the_cut_to_where_least_crosses(
    captured: Captured, made_up: MadeUp
) -> None:
    profile, two = sized(captured("swin"), made_up(2))
    found = candidate_cuts(profile, two)
    assert len(set(found.bytes)) > 1
    cuts = choose_cuts(profile, two, 2, 1.0, 0.0)
    assert cuts is not None
    crossing = dict(zip(found.positions, found.bytes, strict=True))
    assert crossing[profile.position[cuts[0]]] == min(found.bytes)


def test_more_stages_than_cuts_is_an_error(captured: Captured, made_up: MadeUp) -> None:
    profile, two = sized(captured("gpt"), made_up(2))
    most = len(candidate_cuts(profile, two).positions) + 1
    cuts = choose_cuts(profile, two, most, 0.0, 0.0)
    assert cuts is not None
    assert len(cuts) == most - 1
    with pytest.raises(TooManyStages) as caught:
        choose_cuts(profile, two, most + 1, 0.0, 0.0)
    assert (caught.value.asked, caught.value.possible) == (most + 1, most)


def test_every_stage_has_a_parameter_of_its_own(captured: Captured, made_up: MadeUp) -> None:
    for name in ("gpt", "t5", "resnet", "wav2vec2"):
        profile, two = sized(captured(name), made_up(2))
        most = len(candidate_cuts(profile, two).positions) + 1
        cuts = choose_cuts(profile, two, most, 0.0, 0.0)
        assert cuts is not None
        used = [p.positions for p in profile.parameters if p.trainable]
        for first, end in stage_positions(profile, cuts):
            assert any(first <= at < end for positions in used for at in positions)


def test_a_small_first_stage_gets_less(captured: Captured, made_up: MadeUp) -> None:
    profile, two = sized(captured("gpt"), made_up(2))
    saved, _ = two.saved(profile.no_recomputation)
    total = sum(p.bytes for p in profile.parameters) * 4 + saved.sum() * 2
    free = StageLimit(4.0, [2, 1], [total, total])
    tight = StageLimit(4.0, [2, 1], [total / 4, total])
    even = choose_cuts(profile, two, 2, 0.0, 0.0, saved=saved, limit=free)
    uneven = choose_cuts(profile, two, 2, 0.0, 0.0, saved=saved, limit=tight)
    assert even == choose_cuts(profile, two, 2, 0.0, 0.0)
    assert even is not None
    assert uneven is not None
    assert profile.position[uneven[0]] < profile.position[even[0]]
    nothing = StageLimit(4.0, [2, 1], [0, 0])
    assert choose_cuts(profile, two, 2, 0.0, 0.0, saved=saved, limit=nothing) is None


def test_positions_of_stages(captured: Captured) -> None:
    profile = Profile(captured("gpt"))
    (a, b), (c, d) = stage_positions(profile, ("add_4",))
    assert (a, b - 1, c, d) == (0, profile.position["add_4"], b, len(profile))
    for wrong in (("nonsense",), ("add_4", "add_2"), ("add_4", "add_4")):
        with pytest.raises(ValueError, match=r"cuts|called"):
            stage_positions(profile, wrong)


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
def test_casts_of_parameters_are_no_work_of_their_own(
    precision: str, captured: Captured, made_up: MadeUp
) -> None:
    """In lower precision there are at least as many cuts as in float32."""
    step = captured("gpt")
    low = Plan(1, precision=PRECISIONS[precision])
    device = made_up(2).device
    counts = [
        len(candidate_cuts(profile, profile.sized(2, device)).positions)
        for profile in (Profile(step), Profile(lower_precision(step, low)))
    ]
    assert 0 < counts[0] <= counts[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "t5"])
def test_tied_parameters_bring_nothing_else_with_them(
    name: str, precision: str, captured: Captured, made_up: MadeUp
) -> None:
    """Their casts are computed where they are read: no stage has more of a backward than its
    own."""
    step = captured(name)
    profile, two = sized(step, made_up(2))
    cuts = choose_cuts(profile, two, 2, 0.0, 0.0)
    assert cuts is not None
    plan = Plan(2, batch=8, pipeline=2, microbatches=4, precision=PRECISIONS[precision], cuts=cuts)
    read = [
        {p.name for p in profile.parameters if any(first <= at < end for at in p.positions)}
        for first, end in stage_positions(profile, cuts)
    ]
    assert read[0] & read[1], "nothing is tied"
    made = build(step, plan)
    assert [set(stage.parameters) for stage in made.stages] == read
    where = {n: tuple(i for i, own in enumerate(read) if n in own) for n in set().union(*read)}
    again = build(step, plan, homes=where)  # of a batch of another size, say
    assert [set(stage.parameters) for stage in again.stages] == read
    for program in (made, again):
        names = {n.name for n in program.stages[0].forward.graph.nodes if _of_weights(n)}
        sent = {v.name for v in program.stages[0].forward_outputs if v.kind == "sent"}
        assert sent
        assert not sent & names


def _of_weights(node: fx.Node) -> bool:
    """Whether a node is a parameter, or made of them alone."""
    if node.op == "placeholder":
        return node.name.startswith("p_")
    return bool(node.all_input_nodes) and all(map(_of_weights, node.all_input_nodes))
