"""Shares that published runs support, and what is said of a source that had no say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.validation.experts import Phase, Started
from benchmarks.validation.fit import Sample, fitted, text
from benchmarks.validation.rows import FOLDER, Run, read
from benchmarks.validation.systems import SCHEDULED, STARTED_LAUNCH, own_shares
from graphaccel.planner.cluster.catalogue import KILOWATTS, cluster
from graphaccel.planner.plan.plan import Precision
from graphaccel.planner.profile.efficiency import Work, computing, seconds_of

GROUPED_MATMUL = Work(
    kind="product", flops=2 * 32768**3, bytes=6 * 32768**2, dtype="bfloat16",
    rows=32768, columns=32768, inner=32768,
)  # fmt: skip


@cache
def runs() -> tuple[Run, ...]:
    rows = [row for file in sorted(FOLDER.glob("*.csv")) for row in read(file)]
    return tuple(row for row in rows if isinstance(row, Run))


def sample_of(part: str, device: str, share: float = 1.0) -> Sample:
    """A run of a source, which is one large product, with `share` of the rate that is predicted."""
    known = cluster(device, 1).device
    run = next(r for r in runs() if part in r.source and r.device == device and not r.products)
    return Sample(replace(run, seconds=1.0 / share), known, [(GROUPED_MATMUL, 1)], 1.0, 0.0)


def test_a_source_is_predicted_with_what_the_others_say() -> None:
    """One that reaches 0.8 of the rate is off by that, and so are the others with its share."""
    theirs, others = sample_of("llm-foundry", "h100-80gb", 0.8), sample_of("dgxc", "h100-80gb")
    assert own_shares(theirs.run.source) == ()
    figures = fitted([theirs, others])
    mine, rest = (figures["sources"][s.run.reported] for s in (theirs, others))
    assert mine["left_out"] == pytest.approx(0.2, abs=1e-3)
    assert rest["left_out"] == pytest.approx(0.25, abs=0.02)  # the grid goes in steps of 0.02
    assert mine["without"] == []
    assert "20.0 %  " in text(figures)


def test_host_time_is_that_of_other_eager_systems() -> None:
    """Of two sources that start operations eagerly each is left out with what the other says; the
    time of an operation does not change what starts none so."""
    many = Work(kind="", bytes=8, dtype="float16", calls=1000)
    slow, fast = (
        replace(one, works=[(many, 1)], device=replace(one.device, launch_seconds=launch),
                run=replace(one.run, seconds=1000 * launch), scaled=1000 * launch)
        for one, launch in (
            (sample_of("ground_truth_single", "a100-80gb"), 6e-5),
            (sample_of("ground_truth_multi", "a100-80gb"), 5e-5),
        )
    )  # fmt: skip
    assert own_shares(slow.run.source) == ("launch_seconds", "gap_seconds")
    others = sample_of("sc21", "a100-80gb")
    figures = fitted([slow, fast, others])
    mine, rest = (figures["sources"][s.run.reported] for s in (slow, fast))
    assert mine["left_out"] == pytest.approx(1 - 5 / 6)
    assert rest["left_out"] == pytest.approx(6 / 5 - 1)
    assert figures["sources"][others.run.reported]["fitted"] == pytest.approx(0, abs=1e-3)
    assert text(figures).count("without its launch_seconds and gap_seconds") == 1


def test_starts_of_mixtures_are_fitted_apart() -> None:
    """Left out, they take as long as those of other systems."""
    every, parts = (sample_of(p, d) for p, d in (("ground_truth_multi", "a100-80gb"),
                                                 ("Bridge", "h100-80gb")))  # fmt: skip
    many = Work(kind="", bytes=8, dtype="float16", calls=1000)
    every = replace(every, works=[(many, 1)], device=replace(every.device, launch_seconds=5e-5),
                    run=replace(every.run, seconds=0.05), scaled=0.05)  # fmt: skip
    started = Started(Phase(1000), Phase(2000))
    told = started.waits(parts.device, STARTED_LAUNCH)
    parts = replace(parts, works=[], started=started, scaled=told,
                    run=replace(parts.run, seconds=3000 * 8e-5))  # fmt: skip
    figures = fitted([every, parts, sample_of("sc21", "a100-80gb"), sample_of("dgxc", "h100-80gb")])
    assert figures["launch_seconds"] == pytest.approx(5e-5)
    assert figures["started_seconds"] == pytest.approx(8e-5)
    mine = figures["sources"][parts.run.reported]
    assert mine["fitted"] == pytest.approx(0, abs=1e-6)
    assert mine["left_out"] == pytest.approx(3 / 8)
    assert mine["without"] == ["started_seconds", "scheduled"]
    assert "50 us to start an operation, 80 in parts of mixtures" in text(figures)


def test_who_alone_schedules_two_microbatches_is_left_out_with_what_that_takes() -> None:
    parts, other = sample_of("Bridge", "h100-80gb"), sample_of("dgxc", "h100-80gb")
    started = Started(Phase(1000), Phase(2000), scheduled=True)
    told = started.waits(parts.device, STARTED_LAUNCH)
    run = replace(parts.run, seconds=told)
    parts = replace(parts, works=[], started=started, scaled=told, rest=0.0, run=run)
    usual = told / SCHEDULED
    eager = replace(parts, started=replace(started, scheduled=False), scaled=usual, run=replace(
        run, source="NVIDIA/dgxc-benchmarking@v0 a", seconds=usual))  # fmt: skip
    figures = fitted([parts, eager, other, sample_of("sc21", "a100-80gb")])
    mine = figures["sources"][run.reported]
    assert mine["fitted"] == pytest.approx(0, abs=1e-6)
    assert mine["left_out"] == pytest.approx(1 - 1 / SCHEDULED)
    assert mine["without"] == ["started_seconds", "scheduled"]


def test_products_in_eight_bits_have_a_share_of_their_own() -> None:
    """One that is fitted on runs that have them, and that changes nothing of those that do not."""
    whole, few = sample_of("dgxc", "h100-80gb"), sample_of("llm-foundry", "h100-80gb")
    low = Precision("bfloat16", matmul="float8_e4m3fn")
    device = replace(computing(whole.device, low), product_8_bits=0.6)
    few = replace(few, device=device, run=replace(few.run, products=low.matmul))
    figures = fitted([whole, few])
    assert figures["families"]["h100"]["product"] == whole.device.product
    assert figures["families"]["h100"]["eight_bits"] == 0.6
    # No run says how fast a copy is: casts are at the least rate of the grid, 0.6 in place of 0.9.
    casts = 2 * GROUPED_MATMUL.rows * GROUPED_MATMUL.inner / device.memory_bandwidth
    longer = casts * (0.9 / 0.6 - 1) / seconds_of(GROUPED_MATMUL, device)
    assert figures["sources"][few.run.reported]["fitted"] == pytest.approx(longer, rel=0.02)
    # Nothing else says what such products reach: as much as others do.
    left = figures["sources"][few.run.reported]["left_out"]
    assert left == pytest.approx(1 - 0.6 / whole.device.product, abs=2e-2)


def test_a_device_on_which_nothing_else_ran_is_told_by_the_others() -> None:
    alone = fitted([sample_of("SimuMax", "b200-192gb")])
    (figures,) = alone["sources"].values()
    assert figures["left_out"] is None
    assert "   none " in text(alone)
    both = fitted([sample_of("SimuMax", "b200-192gb"), sample_of("sc21", "a100-80gb")])
    apart = next(f for name, f in both["sources"].items() if "SimuMax" in name)
    # 0.51 measured alone, times 0.70 of 0.77 that a run reaches on A100: 0.464 for 0.52.
    assert apart["left_out"] == pytest.approx(0.52 / (0.51 * 0.70 / 0.77) - 1, abs=2e-3)


def test_blackwells_stand_for_one_another_by_their_power() -> None:
    """A rate that one machine reaches is told of another, by its watts."""
    slow, fast = sample_of("SimuMax", "b200-192gb"), sample_of("Bridge", "gb300-288gb")
    figures = fitted([slow, fast])
    assert list(figures["families"]) == ["b200"]
    assert figures["families"]["b200"]["product"] == pytest.approx(0.52)
    for source in figures["sources"].values():
        assert source["left_out"] == pytest.approx(0, abs=1e-2)
    apart = fitted([slow, replace(fast, run=replace(fast.run, seconds=1.25))])
    mine = next(f for name, f in apart["sources"].items() if "SimuMax" in name)
    assert mine["left_out"] == pytest.approx(0.25, abs=3e-2)


@pytest.mark.parametrize(
    ("dtype", "reached", "power"),
    [("bfloat16", "product", 0.87), ("float8_e4m3fn", "product_8_bits", 1.25)],
)
def test_what_ships_of_blackwells_are_the_rates_of_one_by_power(
    dtype: str, reached: str, power: float
) -> None:
    def rate(kind: str) -> float:
        device = cluster(kind, 1).device
        return device.peak_flops[dtype] * float(getattr(device, reached))

    for machine, size in (("b300", 288), ("gb200", 192), ("gb300", 288)):
        more = rate(f"{machine}-{size}gb") / rate("b200-192gb")
        assert more == pytest.approx(KILOWATTS[machine] ** power)
