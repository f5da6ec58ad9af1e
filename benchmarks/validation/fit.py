"""The shares of `planner.cluster` that published runs support, and how well they hold elsewhere.

For each family of devices three numbers: what large products reach of the peak, what a copy reaches
of the memory's bandwidth, and fused attention (forward and backward alike, as a factor on what was
measured alone). They are those of a grid with the least mean error, each source counting the same.
Then each source is left out, and predicted with what the others say; where no other ran on the
device, with what kernels reach when measured alone (`ALONE`), times what runs of the other families
reach of that: a device that trains is hotter and shares its memory.

Changing a share scales the time of a microbatch, by all of its nodes; what is sent stays.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.validation.predict import Predicted
from benchmarks.validation.rows import Run
from graphaccel.planner.cluster import Device, cluster
from graphaccel.planner.efficiency import Work, gap_seconds, seconds_of

# Shares of the peak of large products, measured alone: SimuMax's configs/system.
ALONE = {"a100": 0.77, "b200": 0.51}
_PRODUCTS = [n / 100 for n in range(40, 84, 2)]
_COPIES = (0.6, 0.7, 0.8, 0.9)
_ATTENTION = (0.8, 1.0, 1.2)


@dataclass(frozen=True)
class Sample:
    """A run with its prediction, taken apart: seconds of the device and of the process for each
    microbatch, what scales with them, and the rest of the step."""

    run: Run
    device: Device
    works: Sequence[tuple[Work, int]]
    scaled: float
    rest: float


@dataclass(frozen=True)
class Shares:
    """What is fitted of a family."""

    product: float
    copy: float
    attention: float


def sample(run: Run, predicted: Predicted) -> Sample:
    """A prediction, ready to be made again with other shares."""
    parts = predicted.plan.prediction
    assert parts is not None
    rest = parts.communication + parts.optimizer
    works = predicted.works()
    return Sample(run, predicted.where.device, works, parts.compute + parts.bubble, rest)


def fitted(samples: Sequence[Sample]) -> str:
    """A table: shares by family, and the error of each source, fitted and left out."""
    lines = []
    left: dict[str, list[float]] = defaultdict(list)
    fit: dict[str, list[float]] = defaultdict(list)
    families = _grouped(samples, lambda s: _family(s.run))
    found = {name: _best(members) for name, members in families.items()}
    for family, members in families.items():
        shares = found[family]
        lines.append(
            f"{family}: products {shares.product:.2f} of the peak, copies {shares.copy:.2f} of the "
            f"bandwidth, attention x {shares.attention:.1f}; {len(members)} runs"
        )
        by_source = _grouped(members, lambda s: s.run.source)
        for source, own in by_source.items():
            fit[source] += [abs(_error(s, shares)) for s in own]
            others = [s for s in members if s.run.source != source]
            apart = _best(others) if others else _elsewhere(family, found, shares)
            left[source] += [abs(_error(s, apart)) for s in own]
    lines.append("mean |error| of the step time, fitted on all and with the source left out:")
    for source in sorted(fit):
        both = [100 * statistics.mean(errors[source]) for errors in (fit, left)]
        lines.append(f"{len(fit[source]):5} runs  {both[0]:5.1f} %  {both[1]:5.1f} %  {source}")
    both = [100 * statistics.mean(map(statistics.mean, e.values())) for e in (fit, left)]
    lines.append(f"mean over the sources: {both[0]:.1f} %, left out {both[1]:.1f} %")
    return "\n".join(lines)


def _elsewhere(family: str, found: dict[str, Shares], own: Shares) -> Shares:
    """What runs on other devices say of a family, where kernels were measured alone on it."""
    kept = [s.product / ALONE[f] for f, s in found.items() if f in ALONE and f != family]
    if family not in ALONE or not kept:
        return own
    others = [s for f, s in found.items() if f != family]
    copy = statistics.mean(s.copy for s in others)
    attention = statistics.mean(s.attention for s in others)
    return Shares(ALONE[family] * statistics.mean(kept), copy, attention)


def _best(samples: Sequence[Sample]) -> Shares:
    by_source = _grouped(samples, lambda s: s.run.source)

    def error(shares: Shares) -> float:
        return statistics.mean(
            statistics.mean(abs(_error(s, shares)) for s in own) for own in by_source.values()
        )

    return min((Shares(*c) for c in product(_PRODUCTS, _COPIES, _ATTENTION)), key=error)


def _error(one: Sample, shares: Shares) -> float:
    usual = cluster(one.run.device, 1).device
    library = one.device.product / usual.product
    device = replace(
        one.device,
        product=shares.product * library,
        attention=one.device.attention * shares.attention,
        attention_backward=one.device.attention_backward * shares.attention,
        memory_bandwidth=one.device.memory_bandwidth * shares.copy / copies(one.run.device),
    )
    ratio = _microbatch(one, device) / _microbatch(one, one.device)
    return (one.scaled * ratio + one.rest) / one.run.seconds - 1


def _microbatch(one: Sample, device: Device) -> float:
    gap = gap_seconds(device)
    busy = sum(n * (seconds_of(w, device) + gap * w.calls) for w, n in one.works)
    return max(busy, device.launch_seconds * sum(n * w.calls for w, n in one.works))


def copies(device: str) -> float:
    """The share of the datasheet's bandwidth that the catalogue counts on."""
    paper = {"a100-40gb": 1.555, "a100-80gb": 2.039, "h100-80gb": 3.35, "b200-192gb": 7.7}
    return cluster(device, 1).device.memory_bandwidth / paper[device] / 1e12


def _family(run: Run) -> str:
    return run.device.split("-")[0]


def _grouped(samples, key):  # type: ignore[no-untyped-def]
    found = defaultdict(list)
    for one in samples:
        found[key(one)].append(one)
    return dict(sorted(found.items()))
