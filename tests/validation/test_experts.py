"""Mixtures of experts as published systems train them: what is started one by one, and biases."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.validation.experts import NOTHING_STARTED, Phase, Started, waited_beside_another
from benchmarks.validation.fit import sample
from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.predict import Predicted
from benchmarks.validation.recipes import beside_another, started
from benchmarks.validation.rows import FOLDER, Run, read
from benchmarks.validation.systems import SCHEDULED, STARTED_LAUNCH
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.communication import INTERFERENCE
from graphaccel.planner.profile.efficiency import Work, seconds_of
from tests.validation.predictions import predict

ALL, EXPERTS = frozenset({"experts", "router", "rest"}), frozenset({"experts"})


@cache
def runs() -> tuple[Run, ...]:
    rows = [row for file in sorted(FOLDER.glob("*.csv")) for row in read(file)]
    return tuple(row for row in rows if isinstance(row, Run) and row.kind in MIXTURES)


def small(kind: str, parts: frozenset[str], **more: object) -> Run:
    """Two layers of a mixture whose experts 8 devices share, small for the GPU: all of its time is
    that of starting operations."""
    run = next(r for r in runs() if r.kind == kind and "Bridge" in r.source and not r.products)
    system = replace(run.system, started=parts, **more)  # type: ignore[arg-type]
    return replace(
        run, system=system, layers=2, sequence=128, vocabulary=512, devices=8, data=8, tensor=1,
        pipeline=1, interleave=1, expert=8, sharing=8, batch=8, microbatch=1, recompute="none",
        memory=None, device="h100-80gb",
    )  # fmt: skip


@cache
def predicted(kind: str, parts: frozenset[str], **more: bool) -> Predicted:
    return predict(small(kind, parts, **{"weighs_biases": False, **more}))


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (("Qwen3_235B_a22B", "B300", "mxfp8", "26.02"), ALL),
        (("Qwen3_235B_a22B", "GB300", "mxfp8", "26.04.01"), EXPERTS),
        (("Qwen3_235B_a22B", "GB300", "bf16", "25.11"), frozenset({"experts", "rest"})),
        (("Qwen3_235B_a22B", "GB300", "mxfp8", "26.06"), frozenset()),
        (("GPT OSS 120B", "GB200", "bf16", "26.04"), ALL),
        (("GPT OSS 120B", "B300", "mxfp8", "26.06"), EXPERTS),
        (("Nemotron_3_Super", "B200", "mxfp8", "26.04"), ALL),
        (("Nemotron_3_Super", "B200", "nvfp4", "26.04"), EXPERTS),
        (("Nemotron_3_Super", "GB200", "mxfp8", "26.08"), EXPERTS),
        (("DeepSeekV3 (w/o MTP)", "GB200", "bf16", "25.11"), frozenset({"experts", "rest"})),
        (("DeepSeekV3", "B300", "mxfp8", "26.04"), ALL),
        (("DeepSeekV3", "B300", "mxfp8", "26.06"), EXPERTS),
        (("DeepSeekV3", "GB200", "mxfp8", "26.06"), frozenset()),
        (("Qwen3_30B_a3B", "B200", "mxfp8", "26.02.01"), frozenset({"experts", "rest"})),
        (("Qwen3_30B_a3B", "B200", "mxfp8", "26.04"), EXPERTS),
        (("Qwen3_30B_a3B", "B300", "mxfp8", "26.06"), frozenset()),
        (("Qwen3_30B_a3B", "H100", "fp8", "26.06"), ALL),
    ],
)
def test_what_recipes_start_one_by_one(
    asked: tuple[str, str, str, str], parts: frozenset[str]
) -> None:
    assert started(*asked) == parts


def test_rows_have_what_their_recipe_says() -> None:
    """Those of one source; biases only of the model that has them, where no kernel fuses them."""
    for run in runs():
        assert bool(run.system.started) <= ("Megatron-Bridge" in run.source)
        biased = run.kind == "GPT OSS 120B" and bool(run.system.started)
        assert run.system.weighs_biases == biased
        fused = "rotary" in run.system.fusions
        assert fused == (run.kind != "GPT OSS 120B")
        assert run.system.latent_rotary == ("Megatron-Bridge" in run.source)
        if "Megatron-Bridge" in run.source and not run.system.started:
            assert run.system.beside_another
    assert {r.sharing for r in runs() if r.kind == "Qwen3_235B_a22B" and r.tensor == 2} == {32}


@pytest.mark.parametrize(
    ("mixture", "device", "release", "beside"),
    [
        ("Qwen3_235B_a22B", "H100", "26.08", True),
        ("Qwen3_235B_a22B", "B200", "25.11", True),
        ("Qwen3_235B_a22B", "B200", "26.02", False),
        ("Qwen3_235B_a22B", "B300", "26.02.01", True),
        ("Qwen3_235B_a22B", "B300", "26.04", False),
        ("Qwen3_235B_a22B", "GB200", "26.04", False),
        ("GPT OSS 120B", "GB200", "26.02.01", False),
        ("GPT OSS 120B", "GB200", "26.04.01", True),
        ("DeepSeekV3", "B200", "26.04", False),
    ],
)
def test_recipes_that_send_beside_another_microbatch(
    mixture: str, device: str, release: str, beside: bool
) -> None:
    assert beside_another(mixture, device, release) == beside


def test_rows_send_beside_another_microbatch_as_their_recipe_does() -> None:
    found = {
        (run.kind, run.device.split("-")[0], run.source.split()[-1])
        for run in runs()
        if run.system.beside_another and run.system.started
    }
    assert found == {
        *(("Qwen3_235B_a22B", "h100", r)
          for r in ("25.11", "26.02", "26.02.01", "26.04", "26.04.01")),
        ("Qwen3_235B_a22B", "b200", "25.11"),
        ("Qwen3_235B_a22B", "b300", "26.02"),
        ("Qwen3_235B_a22B", "b300", "26.02.01"),
        ("GPT OSS 120B", "gb200", "26.04"),
        ("GPT OSS 120B", "gb200", "26.04.01"),
    }  # fmt: skip


@pytest.mark.release
def test_what_the_forward_sends_is_waited_for_where_a_process_starts_the_router() -> None:
    """It waits for how many rows each expert gets. Nothing is sent that computing does not hide."""
    found, sent = [], 1e-9
    for parts in (EXPERTS, ALL):
        run = replace(small("Qwen3_235B_a22B", parts), batch=32)
        one = predict(run)
        assert one.plan.microbatches == 4
        found.append(waited_beside_another(run, one.profile, one.plan, one.where, sent))
    hidden = sent * INTERFERENCE
    assert found[0] == pytest.approx(sent / 4 + 3 / 4 * hidden)
    assert found[1] == pytest.approx(sent / 4 + 3 / 4 * (sent + hidden) / 2)


@pytest.mark.release
def test_what_is_sent_beside_another_microbatch_takes_less() -> None:
    """Of four microbatches the first forward and the last backward have none beside them. Of the
    others all hides where that is computed long enough, and takes it a share longer."""
    run = replace(small("Qwen3_235B_a22B", frozenset()), batch=32, sequence=2048)
    both = [
        predict(replace(run, system=replace(run.system, beside_another=on))) for on in (False, True)
    ]
    alone, beside = (one.plan.prediction for one in both)
    assert alone is not None
    assert beside is not None
    assert both[0].plan.microbatches == 4
    sent = (both[0].seconds - both[1].seconds) / (3 / 4) / (1 - INTERFERENCE)
    assert 0 < sent <= alone.communication
    assert beside.compute == pytest.approx(alone.compute)
    waits = waited_beside_another(run, both[0].profile, both[0].plan, both[0].where, 1e3)
    assert waits == pytest.approx(1e3, rel=1e-2)  # nothing is computed as long as that


def test_experts_apart_read_and_write_while_nothing_is_computed() -> None:
    run = small("Qwen3_235B_a22B", frozenset())
    both = [
        predict(replace(run, system=replace(run.system, experts_apart=on))) for on in (False, True)
    ]
    together, apart = (Counter[Work]() for _ in both)
    for told, one in zip((together, apart), both, strict=True):
        for work, n in one.works():
            told[work] += n
    device = both[0].where.device
    products = [w for w in together if w.op.startswith("graphaccel.expert") and w not in apart]
    assert len(products) > 0
    more = sum(
        together[w] * (seconds_of(replace(w, bytes=0), device) + w.bytes / device.memory_bandwidth
                       - seconds_of(w, device))
        for w in products
    )  # fmt: skip
    asked = [sum(n * seconds_of(w, device) for w, n in told.items()) for told in (together, apart)]
    assert more > 0
    assert asked[1] - asked[0] == pytest.approx(more)
    parts = [one.plan.prediction for one in both]
    assert parts[1].compute / parts[0].compute == pytest.approx(asked[1] / asked[0], rel=1e-6)


def test_a_device_waits_for_what_its_own_work_does_not_hide() -> None:
    """In each phase alone; half of what is sent hides in each."""
    device = cluster("h100-80gb", 1).device
    work = Work(bytes=1 << 30)
    one = Started(Phase(100, ((work, 3),)), Phase(150, ((work, 8),)), 0.0002)
    ahead, behind = (n * seconds_of(work, device) + 0.0001 for n in (3, 8))
    assert one.count == 250
    assert one.waits(device, 1e-3) == pytest.approx(0.1 - ahead + 0.15 - behind)
    assert one.waits(device, ahead / 80) == pytest.approx(0.25 * ahead)
    assert one.waits(device, ahead / 400) == 0.0
    assert NOTHING_STARTED.waits(device, 1.0) == 0.0


def test_a_process_that_schedules_two_microbatches_is_slower() -> None:
    device = cluster("h100-80gb", 1).device
    assert Started(Phase(100), scheduled=True).waits(device, 1e-3) == pytest.approx(0.1 * SCHEDULED)
    assert Started(Phase(100), scheduled=True).waits(device, 1e-3, 1.0) == pytest.approx(0.1)
    assert Started(Phase(100)).waits(device, 1e-3, 9.0) == pytest.approx(0.1)


def test_a_grace_starts_operations_more_slowly() -> None:
    many = Started(Phase(100))
    x86, grace = (cluster(name, 1).device for name in ("b200-192gb", "gb200-192gb"))
    assert many.waits(x86, 1e-3) == pytest.approx(0.1)
    assert many.waits(grace, 1e-3) == pytest.approx(0.1 * 2)


def test_each_expert_starts_its_own_products() -> None:
    """16 experts a device, of which each starts 6 products, two forward, and two backward for each
    of them, besides the operation that does so; all else is one operation."""
    experts, all_parts = predicted("Qwen3_235B_a22B", EXPERTS), predicted("Qwen3_235B_a22B", ALL)
    ahead, behind = experts.started.forward, experts.started.backward
    others = [n * work.calls for work, n in ahead.beside if work.kind != "product"]
    assert ahead.count == 2 * 2 * (1 + 128 / 8) + sum(others)
    assert behind.count - 2 * 4 * (1 + 128 / 8) > 0
    assert all_parts.started.count > experts.started.count + 2 * 40


def test_backward_hides_starts_behind_all_of_it() -> None:
    """And forward behind what is started alone: it waits for the counts of rows at each layer."""
    experts, all_parts = predicted("Qwen3_235B_a22B", EXPERTS), predicted("Qwen3_235B_a22B", ALL)
    assert experts.started.backward.beside == all_parts.started.backward.beside
    assert len(experts.started.forward.beside) < len(all_parts.started.forward.beside)
    both = Counter(all_parts.started.forward.beside) + Counter(all_parts.started.backward.beside)
    asked = sum(n * seconds_of(work, all_parts.where.device) for work, n in all_parts.works())
    told = sum(t * n * seconds_of(w, all_parts.where.device) for (w, n), t in both.items())
    assert told == pytest.approx(asked)


def test_a_step_takes_as_long_as_its_process() -> None:
    """So small that the device does little but wait."""
    none, every = predicted("Qwen3_235B_a22B", frozenset()), predicted("Qwen3_235B_a22B", ALL)
    assert none.started == NOTHING_STARTED
    device, parts = every.where.device, none.plan.prediction
    assert parts is not None
    busy = sum(n * seconds_of(work, device) for work, n in none.works())
    assert every.started.count * STARTED_LAUNCH > 2 * busy
    share = every.started.waits(device, STARTED_LAUNCH) / busy
    assert every.seconds - none.seconds == pytest.approx(share * (parts.compute + parts.bubble))
    one = sample(every.run, every)
    assert one.eager
    assert not sample(none.run, none).eager


def test_biases_take_memory_traffic_and_starts() -> None:
    """Each number that experts give is read and written for it in 28 bytes, and in 40 backward."""
    kind = "GPT OSS 120B"
    plain, biased = predicted(kind, EXPERTS), predicted(kind, EXPERTS, weighs_biases=True)
    for phase, starts in (("forward", 2), ("backward", 5)):
        more = getattr(biased.started, phase).count - getattr(plain.started, phase).count
        assert more == 2 * starts * 128 / 8
    *others, ahead, behind = biased.works()
    assert [n for _, n in (ahead, behind)] == [2, 2]
    assert [work.bytes for work, _ in (ahead, behind)] == [n * 128 * 4 * 2880 for n in (28, 40)]
    assert others == plain.works()
    assert biased.seconds > plain.seconds


@pytest.mark.release
def test_latent_attention_turns_queries_and_keys_in_two_kernels() -> None:
    """Which read and write the 64 numbers of a head of queries that are turned, and make 192 of
    keys and 128 of values from 256; products, norms and attention are as they were."""
    kind = "DeepSeekV3 (w/o MTP)"
    apart = predicted(kind, ALL, latent_rotary=False)
    fused = predicted(kind, ALL, latent_rotary=True)
    *others, ahead, behind = fused.works()
    assert ahead == behind == (ahead[0], 2)
    assert ahead[0].bytes == 2 * 128 * 128 * (2 * 64 + 256 + 192 + 128)
    gone = Counter(apart.works()) - Counter(others)
    assert not Counter(others) - Counter(apart.works())
    assert gone
    assert not any(work.flops for work, _ in gone)
    for phase in ("forward", "backward"):
        count = getattr(apart.started, phase).count - getattr(fused.started, phase).count
        assert count > 2 * 15
    assert fused.seconds < apart.seconds
    graphs = predicted(kind, frozenset(), latent_rotary=True)  # all of it in CUDA graphs
    assert graphs.started == NOTHING_STARTED
    assert graphs.works() == fused.works()


def test_what_a_graph_holds_hides_starts_in_backward_alone() -> None:
    kind = "DeepSeekV3 (w/o MTP)"
    experts, every = (predicted(kind, parts, latent_rotary=True) for parts in (EXPERTS, ALL))
    turned = every.works()[-1]
    assert turned in every.started.forward.beside
    assert turned not in experts.started.forward.beside
    assert turned in experts.started.backward.beside
