"""What kernels reach of a device's peak, against what was measured, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.estimate.stage_costs import flight, held_together
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.efficiency import (
    Work,
    computing,
    efficiency,
    gap_seconds,
    seconds_of,
)

A100 = replace(cluster("a100-80gb", 1).device, product=0.77)  # a kernel alone on the device


def product(rows: int, columns: int, inner: int, count: int = 1) -> Work:
    flops = 2 * count * rows * columns * inner
    return Work("product", flops, 0, "bfloat16", rows, columns, inner, count)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "measured"),
    [  # MooreThreads/SimuMax@4dcaae5 configs/system/a100_pcie.json
        (4096, 128256, 8192, 0.745),
        (4096, 8192, 28672, 0.746),
        (4096, 4096, 14336, 0.758),
        (8192, 14336, 4096, 0.705),
        (4096, 4096, 4096, 0.693),
        (3072, 4096, 4096, 0.647),
        (1536, 4096, 4096, 0.656),
    ],
)
def test_products_reach_what_was_measured(
    rows: int, columns: int, inner: int, measured: float
) -> None:
    assert efficiency(product(rows, columns, inner), A100) == pytest.approx(measured, rel=0.15)


def test_attention_reaches_what_was_measured() -> None:
    """Of the same file, forward, 4096 tokens, heads of 128; FLOPs that a causal mask leaves."""
    for heads, measured in ((64, 0.593), (32, 0.566), (16, 0.496), (8, 0.388)):
        flops = 2 * heads * 4096**2 * 128
        work = Work("attention", flops, 0, "bfloat16", 4096, 4096, 128, heads)
        assert efficiency(work, A100) == pytest.approx(measured, rel=0.1)


def test_what_does_not_fill_tiles_costs_as_much_as_what_does() -> None:
    whole, odd = (seconds_of(product(2048, n, 4096), A100) for n in (4096, 4096 + 8))
    assert odd > whole
    assert efficiency(product(2048, 4096, 32), A100) < 0.3 * A100.product  # short inner dim
    assert efficiency(product(64, 64, 64), A100) == A100.product / 8


def test_rows_of_an_odd_length_are_slow() -> None:
    """VIA-Research/vTrain, one node: a half of 50257 words takes less than a quarter of all."""
    whole = replace(product(4096, 50257, 2048), aligned=2)
    half = replace(product(4096, 25128, 2048), aligned=16)
    assert seconds_of(half, A100) < seconds_of(whole, A100) / 4
    even = replace(product(4096, 25126, 2048), aligned=4)
    assert seconds_of(even, A100) == pytest.approx(seconds_of(half, A100), rel=0.02)


@pytest.mark.parametrize(
    ("words", "aligned", "measured"),
    [(50257, 2, 121e12), (30522, 4, 232e12)],
)
def test_rows_that_hopper_can_not_load_are_slow(words: int, aligned: int, measured: float) -> None:
    """The three products of a head of 768, 4096 tokens at a time: `benchmarks.gpu` on an H200,
    torch 2.11, as its profiler has them."""
    device = cluster("h200-141gb", 1).device
    shapes = ((4096, words, 768), (4096, 768, words), (words, 768, 4096))
    works = [replace(product(*shape), aligned=aligned) for shape in shapes]
    rate = sum(w.flops for w in works) / sum(seconds_of(w, device) for w in works)
    assert rate == pytest.approx(measured, rel=0.25)


def test_products_run_at_the_rate_of_what_they_round_to() -> None:
    device = cluster("h100-80gb", 1).device
    eight, tensor_float = (computing(device, PRECISIONS[name]) for name in ("fp8", "tf32"))
    large = product(8192, 8192, 8192)
    ideal = device.peak_flops["bfloat16"] / device.peak_flops["float8_e4m3fn"]
    reached = device.product / device.product_8_bits
    cast = 2 * 8192**2 / device.memory_bandwidth  # as it lies, and transposed
    multiplied = ideal * reached * seconds_of(large, device)
    assert seconds_of(large, eight) == pytest.approx(multiplied + cast)
    shared = replace(large, cast=1 / 3)  # with two more products that read the same
    assert seconds_of(shared, eight) == pytest.approx(multiplied + cast / 3)
    small = replace(product(8192, 8192, 16), bytes=2 * 8192**2)  # takes as long as it moves
    assert seconds_of(small, eight) > seconds_of(small, device)
    attention = replace(large, kind="attention")
    assert seconds_of(attention, eight) == seconds_of(attention, device)
    wide = replace(large, dtype="float32")
    rates = device.peak_flops["float32"] / device.peak_flops["tfloat32"]
    assert seconds_of(wide, tensor_float) == pytest.approx(rates * seconds_of(wide, device))
    assert computing(device, PRECISIONS["bf16"]) == device


def test_many_small_products_fill_the_device_together() -> None:
    one, many = (efficiency(product(256, 256, 4096, n), A100) for n in (1, 64))
    assert many > 1.5 * one


def test_a_cpu_reaches_its_rates_and_waits_for_each_call() -> None:
    device = Device("cpu", 1, {"float32": 1e9}, 1e9, 5e-6)
    assert seconds_of(product(100, 100, 100), device) == pytest.approx(2e-3)
    assert gap_seconds(device) == 5e-6
    assert gap_seconds(A100) < A100.launch_seconds


def test_verdicts_on_memory() -> None:
    where = cluster("a100-80gb", 1)
    free = where.device.memory - where.context_bytes
    said = [where.verdict(free * part) for part in (0.93, 0.96, 1.0, 1.1)]
    assert said == ["safe", "likely", "risky", "impossible"]


def test_stages_of_a_rank_are_not_full_at_once() -> None:
    plan = Plan(4, pipeline=4, interleave=2, microbatches=8, schedule="interleaved", batch=8)
    together, apart = held_together(plan, [1] * 8), flight(plan)
    assert all(together[s] <= apart[s] for s in apart)
    first = [s for s in apart if s % 4 == 0]
    assert sum(together[s] for s in first) < sum(apart[s] for s in first)
    assert sum(together[s] for s in first) == 11  # 2 (p - 1) + (v - 1) p + 1
