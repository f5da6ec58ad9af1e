"""Layers that were traced alone, added up, and products with scales of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.validation.predict import Predicted, cluster_of
from benchmarks.validation.rows import FOLDER, Run, read
from benchmarks.validation.traced import GAP, seconds, segments
from graphaccel.capture.symbols import BATCH
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.profile.cost import Sizes
from graphaccel.planner.profile.efficiency import Work, gap_seconds
from tests.validation.predictions import predict

LAUNCH = 50e-6


def _taking(microseconds: float) -> Work:
    """A call of so many microseconds, with the gap behind it, on an A100."""
    device = cluster("a100-80gb", 1).device
    left = microseconds * 1e-6 - gap_seconds(device)
    return Work(bytes=round(left * device.memory_bandwidth))


def _of(*calls: float) -> float:
    """Microseconds of one piece whose calls take so many each."""
    device = cluster("a100-80gb", 1).device
    return 1e6 * seconds([(tuple(map(_taking, calls)), 1)], device, LAUNCH, gap_seconds(device))


def test_the_device_waits_for_what_is_started_late() -> None:
    assert _of(10, 10) == pytest.approx(110, abs=0.01)  # two launches, and the last call


def test_the_process_is_ahead_behind_a_long_call() -> None:
    assert _of(200, 10, 10) == pytest.approx(50 + 220, abs=0.01)


def test_a_long_call_at_the_end_waits_for_all_that_is_started_before() -> None:
    assert _of(10, 10, 200) == pytest.approx(150 + 200, abs=0.01)


def test_what_one_piece_is_ahead_does_not_help_the_next() -> None:
    device = cluster("a100-80gb", 1).device
    late, long = tuple(map(_taking, (10, 10))), (_taking(400),)
    both = 1e6 * seconds([(late, 3), (long, 1)], device, LAUNCH, gap_seconds(device))
    assert both == pytest.approx(3 * 110 + 450, abs=0.01)


def test_a_tracer_puts_a_gap_between_calls() -> None:
    device = cluster("a100-80gb", 1).device
    long = [(tuple(map(_taking, (200, 200, 200))), 1)]
    more = seconds(long, device, LAUNCH, GAP) - seconds(long, device, LAUNCH, gap_seconds(device))
    assert more == pytest.approx(3 * (GAP - gap_seconds(device)))


def test_scores_that_are_no_multiple_of_four_have_no_fused_softmax() -> None:
    runs = _runs("ground_truth_single")
    plain = {r for r in runs if "scale_mask_softmax" not in r.system.fusions}
    assert plain == {r for r in runs if r.microbatch * r.heads // r.tensor % 4}
    assert 0 < len(plain) < len(runs)


def _runs(part: str, **wanted: object) -> list[Run]:
    every = (row for file in sorted(FOLDER.glob("*.csv")) for row in read(file))
    return [
        r for r in every
        if isinstance(r, Run) and part in r.source
        and all(getattr(r, k) == v for k, v in wanted.items())
    ]  # fmt: skip


def _small(run: Run, **changed: object) -> Run:
    usual = {"layers": 2, "hidden": 256, "sequence": 128, "vocabulary": 512, "heads": 8}
    return replace(run, **{**usual, "kv_heads": 8, "ffn": 1024, **changed})


def _predicted(**wanted: object) -> Predicted:
    run = _runs("ground_truth_single", devices=2, pipeline=1, microbatch=2, **wanted)[0]
    return predict(_small(run), run.devices)


def test_a_step_is_its_pieces() -> None:
    found = _predicted(tensor=1)
    assert found.plan.prediction is not None
    each = seconds(found.pieces, found.where.device, found.run.system.launch_seconds or 0.0, GAP)
    assert found.plan.prediction.compute == pytest.approx(found.plan.microbatches * each)
    sizes = Sizes({**found.profile.step.sizes, BATCH: found.plan.microbatch_size})
    again = segments(found.profile, sizes, found.run)
    assert again == found.pieces


def test_a_loss_over_shares_of_the_words_takes_few_calls() -> None:
    """As many as on one rank, or fewer: Megatron-LM's works in place."""
    one, two = (_predicted(tensor=n).pieces for n in (1, 2))
    calls = [sum(n * len(own) for own, n in pieces) for pieces in (one, two)]
    assert calls[1] <= calls[0] + 40  # the collectives of two layers; 54 more without


def test_layers_of_several_sequences_turn_them() -> None:
    """What enters and what leaves, and its gradient; one sequence lies alike both ways."""
    several = _predicted(tensor=1)
    run, sizes = several.run, Sizes({**several.profile.step.sizes, BATCH: 2})
    alone = segments(several.profile, sizes, replace(run, microbatch=1))
    numbers = run.microbatch * run.sequence * run.hidden
    turned = Work(bytes=4 * numbers, dtype=run.precision)
    blocks = [[own for own, n in pieces if n == 2] for pieces in (several.pieces, alone)]
    with_it, without = (sorted(blocks, key=len) for blocks in blocks)
    assert with_it[0] == (turned, *without[0], turned)
    assert with_it[1] == (turned, *without[1])


def test_a_block_that_is_split_has_as_many_calls_as_a_whole_one() -> None:
    """What sharding puts in, beside what the model's own calls became, was in no trace of theirs:
    half of a bias before a sum, copies of what is sent."""
    one, two = (_predicted(tensor=n).pieces for n in (1, 2))
    blocks = [sorted(len(own) for own, n in pieces if n == 2) for pieces in (one, two)]
    assert blocks[0] == blocks[1] != []


def test_scales_of_rows_take_longer() -> None:
    rows = _runs("asyncTP", products="float8_e4m3fn")
    rates = {r.system.scaled: cluster_of(r, r.devices).device.product_8_bits for r in rows}
    assert set(rates) == {1.0, 0.9}
    assert rates[0.9] == pytest.approx(0.9 * rates[1.0])
