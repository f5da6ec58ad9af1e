"""Shares that published runs support, and what is said of a source that had no say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.validation.fit import Sample, fitted, text
from benchmarks.validation.rows import FOLDER, Run, own_shares, read
from graphaccel.planner.cluster import cluster
from graphaccel.planner.efficiency import Work

PRODUCT = Work(
    kind="product", flops=2 * 32768**3, bytes=6 * 32768**2, dtype="bfloat16",
    rows=32768, columns=32768, inner=32768,
)  # fmt: skip


@cache
def runs() -> tuple[Run, ...]:
    rows = [row for file in sorted(FOLDER.glob("*.csv")) for row in read(file)]
    return tuple(row for row in rows if isinstance(row, Run))


def sample_of(part: str, device: str, share: float = 1.0) -> Sample:
    """A run of a source that took as long as is predicted: one large product, with `share` of the
    rate that the catalogue has."""
    known = cluster(device, 1).device
    run = next(r for r in runs() if part in r.source and r.device == device and not r.products)
    made = replace(known, product=known.product * share)
    return Sample(replace(run, seconds=1.0), made, [(PRODUCT, 1)], 1.0, 0.0)


def test_what_only_a_source_says_is_left_out_with_it() -> None:
    """Of CUDA 11 products on H100 reach 0.8 of what the others say: nothing else tells that."""
    theirs, others = sample_of("llm-foundry", "h100-80gb", 0.8), sample_of("dgxc", "h100-80gb")
    assert own_shares(theirs.run.source) == ("hopper", "attention")
    figures = fitted([theirs, others])
    assert figures["families"]["h100"]["product"] == 0.72
    mine, rest = (figures["sources"][s.run.reported] for s in (theirs, others))
    assert mine["fitted"] == pytest.approx(0, abs=1e-3)
    assert mine["left_out"] == pytest.approx(0.2, abs=1e-3)
    assert rest == {"runs": 1, "fitted": mine["fitted"], "left_out": pytest.approx(0, abs=1e-3),
                    "without": []}  # fmt: skip
    assert "20.0 %  " in text(figures)
    assert text(figures).endswith("README.md, without its hopper and attention")


def test_a_device_on_which_nothing_else_ran_is_told_by_the_others() -> None:
    alone = fitted([sample_of("SimuMax", "b200-192gb")])
    (figures,) = alone["sources"].values()
    assert figures["left_out"] is None
    assert "   none " in text(alone)
    both = fitted([sample_of("SimuMax", "b200-192gb"), sample_of("sc21", "a100-80gb")])
    apart = next(f for name, f in both["sources"].items() if "SimuMax" in name)
    # 0.51 measured alone, times 0.70 of 0.77 that a run reaches on A100: 0.464 for 0.46.
    assert apart["left_out"] == pytest.approx(1 - 0.46 / (0.51 * 0.70 / 0.77), abs=2e-3)
