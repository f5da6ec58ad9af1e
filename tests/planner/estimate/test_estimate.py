"""Predicted memory and time of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.planner.cluster.cluster import Cluster, OpTime
from graphaccel.planner.cluster.communication import all_reduce_seconds, send_seconds
from graphaccel.planner.estimate.data_axis import reduce_counts
from graphaccel.planner.estimate.estimate import predict, predict_seconds
from graphaccel.planner.estimate.estimated_memory import gathered_sizes, predict_memory
from graphaccel.planner.estimate.gradient_buckets import bucket_limit
from graphaccel.planner.estimate.stage_costs import flight, held_together, sized_for, stage_costs
from graphaccel.planner.estimate.stage_messages import device_number, message_bytes
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.profile import Profile
from graphaccel.schedule.table import build
from graphaccel.schedule.validate import in_flight, occupancy

Captured = Callable[[str], StepGraph]
MadeUp = Callable[..., Cluster]


@pytest.fixture(scope="module")
def gpt(captured: Captured) -> Profile:
    return Profile(captured("gpt"))


def plan(devices: int = 1, **decisions: object) -> Plan:
    return Plan(devices=devices, batch=8).decided(**decisions)


NUMBERS = 54_976  # of the zoo's gpt, tied embedding once


def test_states_are_counted_once_for_each_number(gpt: Profile, made_up: MadeUp) -> None:
    (memory,) = predict_memory(gpt, plan(microbatches=2), made_up(1), optimizer_bytes=8)
    assert memory.parameter == memory.gradient == 4 * NUMBERS
    assert memory.optimizer == 8 * NUMBERS
    parts = (memory.activation, memory.temporary, memory.optimizer, 8 * NUMBERS)
    assert memory.tensors == sum(parts)
    assert memory.other == int(0.05 * memory.tensors)  # the made-up fragmentation, no context


def test_one_microbatch_on_one_device_needs_no_accumulators(gpt: Profile, made_up: MadeUp) -> None:
    (memory,) = predict_memory(gpt, plan(), made_up(1), optimizer_bytes=8)
    # At the peak, in the loss, no gradient is there yet; the optimizer's state always is.
    assert "cross_entropy" in memory.at
    assert memory.gradient == 0
    assert memory.optimizer == 8 * NUMBERS


def test_a_tied_weight_lies_on_both_stages_that_use_it(gpt: Profile, made_up: MadeUp) -> None:
    halves = plan(2, pipeline=2, cuts=("add_4",))
    first, last = predict_memory(gpt, halves, made_up(2), optimizer_bytes=0)
    tied = 96 * 32 * 4
    assert first.parameter + last.parameter == 4 * NUMBERS + tied
    assert first.optimizer == last.optimizer == 0


def test_more_in_flight_waits_on_earlier_stages(gpt: Profile, made_up: MadeUp) -> None:
    cuts = ("add_2", "add_4", "add_6")
    four = plan(4, pipeline=4, cuts=cuts, microbatches=8)
    assert flight(four) == {0: 4, 1: 3, 2: 2, 3: 1}
    assert flight(replace(four, schedule="gpipe")) == dict.fromkeys(range(4), 8)
    assert flight(replace(four, microbatches=2)) == {0: 2, 1: 2, 2: 2, 3: 1}
    ranks = predict_memory(gpt, four, made_up(4), 8)
    piped = predict_memory(gpt, replace(four, schedule="gpipe"), made_up(4), 8)
    # Stages 1 and 2 hold the same block: they differ by what waits, one microbatch of it, and by
    # what they sent of it, which lies there until its gradient comes back.
    saved, _ = gpt.sized(1, made_up(4).device).saved(gpt.no_recomputation)
    one = int(saved[gpt.block_at == 1].sum()) + 16 * 32 * 4
    assert ranks[1].activation - ranks[2].activation == one
    assert piped[1].activation - ranks[1].activation == 5 * one


@given(
    st.sampled_from(["1f1b", "gpipe", "zero_bubble", "interleaved"]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 80),
    st.data(),
)
def test_what_waits_is_that_of_the_table(
    name: str, ranks: int, per_rank: int, microbatches: int, data: st.DataObject
) -> None:
    per_rank = per_rank if name == "interleaved" else 1
    asked = plan(ranks, pipeline=ranks, interleave=per_rank, microbatches=microbatches)
    asked = replace(asked, schedule=name, batch=microbatches)
    table = build(name, ranks, per_rank, microbatches)
    # Where gradients of weights are apart, backwards are those of 1F1B.
    waiting = build("1f1b", ranks, 1, microbatches) if name == "zero_bubble" else table
    assert flight(asked) == in_flight(waiting)
    stages = ranks * per_rank
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    found = held_together(asked, sizes)
    for moments in occupancy(table) if per_rank > 1 else ():
        totals = [sum(n * sizes[s] for s, n in moment.held.items()) for moment in moments]
        most = moments[totals.index(max(totals))].held
        assert {s: found[s] for s in most} == most


def test_recomputing_all_blocks_halves_what_waits(gpt: Profile, made_up: MadeUp) -> None:
    keep, again = (
        predict_memory(gpt, plan(recompute=names), made_up(1), 8)[0]
        for names in ((), gpt.block_names)
    )
    assert again.activation < keep.activation / 2
    assert again.peak < keep.peak
    slower = predict_seconds(gpt, plan(recompute=gpt.block_names), made_up(1), 8).seconds
    assert slower > predict_seconds(gpt, plan(), made_up(1), 8).seconds


def test_a_smaller_microbatch_holds_less(gpt: Profile, made_up: MadeUp) -> None:
    peaks = [predict_memory(gpt, plan(microbatches=m), made_up(1), 8)[0].peak for m in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


def test_terms_add_up_to_the_step(gpt: Profile, made_up: MadeUp) -> None:
    for candidate in (
        plan(),
        plan(4, data=2, pipeline=2, cuts=("add_4",), microbatches=4),
        plan(
            2,
            pipeline=2,
            interleave=2,
            cuts=("add_2", "add_4", "add_6"),
            schedule="interleaved",
            microbatches=2,
        ),
    ):
        for simulated in (True, False):
            p = predict_seconds(gpt, candidate, made_up(4), 8, simulated=simulated)
            parts = p.compute + p.communication + p.bubble + p.optimizer
            assert p.seconds == pytest.approx(parts)
            assert min(p.compute, p.optimizer) > 0


def test_simulation_and_closed_form_agree_on_one_device(gpt: Profile, made_up: MadeUp) -> None:
    for microbatches in (1, 4):
        one = plan(microbatches=microbatches)
        exact = predict_seconds(gpt, one, made_up(1), 8, simulated=True)
        closed = predict_seconds(gpt, one, made_up(1), 8, simulated=False)
        assert exact.seconds == pytest.approx(closed.seconds)
        assert exact.bubble == pytest.approx(0.0, abs=1e-12)


def test_an_all_reduce_is_exposed_but_for_what_backward_hides(
    gpt: Profile, made_up: MadeUp
) -> None:
    two = plan(2, data=2)
    cluster = made_up(2)
    whole = all_reduce_seconds(cluster, 4 * NUMBERS, 2)
    # One bucket: it is sent once backward is done, nothing hides it.
    assert predict_seconds(gpt, two, cluster, 8).communication == pytest.approx(whole)
    many = predict_seconds(gpt, replace(two, bucket_bytes=32 << 10), cluster, 8)
    assert 0 < many.communication < whole
    on_cpu = replace(cluster, device=replace(cluster.device, name="cpu"))
    assert predict_seconds(gpt, replace(two, bucket_bytes=32 << 10), on_cpu, 8).communication > (
        many.communication
    )


def test_messages_of_an_encoder_decoder(captured: Captured, made_up: MadeUp) -> None:
    profile = Profile(captured("t5"))
    cuts = ("add_29", "add_35")
    three = plan(3, pipeline=3, cuts=cuts, microbatches=4)
    sized = profile.sized(2, made_up(3).device)
    sent = message_bytes(profile, sized, three)
    encoded = 2 * 16 * 32 * 4
    # The encoder's output is made on stage 0; every decoder stage reads it and sends a gradient
    # back.
    assert sent[0, 2, "forward"] >= encoded
    assert {(0, 1, "forward"), (0, 2, "forward"), (1, 2, "forward")} <= set(sent)
    assert {(1, 0, "backward"), (2, 0, "backward"), (2, 1, "backward")} <= set(sent)


def test_devices_are_numbered_data_innermost(made_up: MadeUp) -> None:
    eight = plan(8, data=4, pipeline=2)
    assert [device_number(eight, 0, d) for d in range(4)] == [0, 1, 2, 3]
    assert device_number(eight, 1, 2) == 6
    # The made-up cluster's inner links hold four devices: data inside, pipeline across.
    assert send_seconds(made_up(8), 1000, 0, device_number(eight, 1)) > send_seconds(
        made_up(8), 1000, 0, device_number(eight, 0, 3)
    )


def test_lower_precision_waits_with_fewer_bytes(
    gpt: Profile, captured: Captured, made_up: MadeUp
) -> None:
    """Under autocast sums between blocks stay as they are, with cast parameters they do not."""
    found = [predict(gpt, plan(), made_up(1), 8).prediction]
    for name in ("bf16", "bf16-params"):
        low = plan(precision=PRECISIONS[name])
        lowered = Profile(lower_precision(captured("gpt"), low))
        found.append(predict(lowered, low, made_up(1), 8).prediction)
    full, half, through = (p.memory[0] for p in found if p is not None)
    assert 0.5 * full.activation < half.activation < 0.8 * full.activation
    assert through.activation < 0.95 * half.activation
    assert through.parameter == half.parameter == full.parameter


def test_buckets_are_those_of_the_passes(gpt: Profile, made_up: MadeUp) -> None:
    mib = 1 << 20
    assert bucket_limit(25 * mib, 40 * mib, scattered=False) == 20 * mib
    assert bucket_limit(25 * mib, 40 * mib, scattered=True) == 10 * mib
    assert bucket_limit(25 * mib, 2 * mib, scattered=True) == mib
    assert bucket_limit(25 * mib, 400 * mib, scattered=True) == 25 * mib
    works = stage_costs(gpt, sized_for(gpt, plan(2, data=2), made_up(2)), plan(2, data=2), 0.0)
    sizes: dict[tuple[str, ...], float] = {(): 40 * mib}
    for zero, count in ((0, 2), (1, 2), (2, 4)):
        two = plan(2, data=2, zero=zero)
        assert reduce_counts(gpt, works[0], two, sizes) == {(): count}
    groups = reduce_counts(gpt, works[0], plan(2, data=2, zero=3), sizes)
    assert groups == {(): len(gathered_sizes(gpt, gpt.parameters, plan(2, data=2, zero=3)))}


def test_a_step_on_shards_starts_as_many_operations(gpt: Profile, made_up: MadeUp) -> None:
    """Half of the bytes spare half of what moving bytes takes."""
    bare = made_up(2)
    row = OpTime("optimizer", bytes=gpt.trained_bytes, count=gpt.trained_tensors, seconds=0.01)
    cluster = replace(bare, device=replace(bare.device, measured=(row,)))
    starts = 10 * bare.device.launch_seconds * gpt.trained_tensors
    assert predict_seconds(gpt, plan(2, data=2), cluster, 8).optimizer == pytest.approx(0.01)
    shared = predict_seconds(gpt, plan(2, data=2, zero=1), cluster, 8)
    assert shared.optimizer == pytest.approx(starts + (0.01 - starts) / 2)


@pytest.mark.parametrize(("zero", "times"), [(0, 0), (1, 1), (2, 2)])
def test_copies_around_buckets_take_what_was_measured(
    gpt: Profile, made_up: MadeUp, zero: int, times: int
) -> None:
    """ZeRO 1 takes parameters in and out of a bucket, 2 writes gradients into one too."""
    bare = made_up(2)
    row = OpTime("aten.copy_", "float32", bytes=8 * NUMBERS, seconds=0.02)
    cluster = replace(bare, device=replace(bare.device, measured=(row,)))
    two = plan(2, data=2, zero=zero)
    free, paid = (predict_seconds(gpt, two, where, 8) for where in (bare, cluster))
    assert paid.communication - free.communication == pytest.approx(times * 0.02, rel=1e-3)
