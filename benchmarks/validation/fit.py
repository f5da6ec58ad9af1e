"""The shares of `planner.cluster` that published runs support, and how well they hold elsewhere.

For each family of devices three numbers: what large products reach of the peak, what a copy reaches
of the memory's bandwidth, and fused attention (forward and backward alike, as a factor on what was
measured alone). They are those of a grid with the least mean error, each source counting the same.
Then each source is left out, and predicted with what the others say: without the shares that were
found in its own times (`rows.own_shares`), and, where no other ran on the device, with what kernels
reach when measured alone (`ALONE`), times what runs of the other families reach of that: a device
that trains is hotter and shares its memory.

Changing a share scales the time of a microbatch, by all of its nodes; what is sent stays.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.validation.predict import Predicted
from benchmarks.validation.rows import Run, own_shares
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


_CHOICES = tuple(Shares(*choice) for choice in product(_PRODUCTS, _COPIES, _ATTENTION))


@dataclass(frozen=True)
class _Tried:
    """A sample, and how far it is off with each of `_CHOICES`."""

    sample: Sample
    errors: Sequence[float]


def sample(run: Run, predicted: Predicted) -> Sample:
    """A prediction, ready to be made again with other shares."""
    parts = predicted.plan.prediction
    assert parts is not None
    rest = parts.communication + parts.optimizer
    works = predicted.works()
    return Sample(run, predicted.where.device, works, parts.compute + parts.bubble, rest)


def fitted(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of each family its shares and runs. Of each source the mean error of the step time with the
    shares that all runs support ("fitted") and with what the others say ("left_out": None where no
    other says anything of the device); "without": what of its system was left out with it."""
    tried = [_Tried(one, [abs(_error(one, shares)) for shares in _CHOICES]) for one in samples]
    families = _grouped(tried, lambda t: _family(t.sample.run))
    found = {name: _best(members) for name, members in families.items()}
    fit: dict[str, list[float]] = defaultdict(list)
    left: dict[str, list[float] | None] = {}
    without: dict[str, tuple[str, ...]] = {}
    for source, members in _grouped(tried, lambda t: t.sample.run.source).items():
        others = {name: _rest(own, source, found[name]) for name, own in families.items()}
        for one in (t.sample for t in members):
            name, family = one.run.reported, _family(one.run)
            fit[name].append(abs(_error(one, found[family])))
            apart = others[family] or _elsewhere(family, others)
            without[name] = own_shares(source)
            if apart is None:
                left[name] = None
            elif (errors := left.setdefault(name, [])) is not None:
                errors.append(abs(_error(one, apart, without[name])))
    return {
        "families": {
            name: {**asdict(found[name]), "runs": len(members)}
            for name, members in families.items()
        },
        "sources": {
            name: {
                "runs": len(errors),
                "fitted": statistics.mean(errors),
                "left_out": _mean(left[name]),
                "without": list(without[name]),
            }
            for name, errors in sorted(fit.items())
        },
    }


def text(figures: dict[str, Any]) -> str:
    """The figures of `fitted` as lines."""
    lines = [
        f"{name}: products {f['product']:.2f} of the peak, copies {f['copy']:.2f} of the "
        f"bandwidth, attention x {f['attention']:.1f}; {f['runs']} runs"
        for name, f in figures["families"].items()
    ]
    lines.append("mean |error| of the step time, fitted on all and with the source left out:")
    for name, f in figures["sources"].items():
        apart = "   none " if f["left_out"] is None else f"{100 * f['left_out']:5.1f} %"
        own = f", without its {' and '.join(f['without'])}" if f["without"] else ""
        lines.append(f"{f['runs']:5} runs  {100 * f['fitted']:5.1f} %  {apart}  {name}{own}")
    return "\n".join(lines)


def _mean(errors: Sequence[float] | None) -> float | None:
    return None if errors is None else statistics.mean(errors)


def _rest(members: Sequence[_Tried], source: str, whole: Shares) -> Shares | None:
    """What a family's runs support without those of a source; None where no other ran on it."""
    others = [t for t in members if t.sample.run.source != source]
    return whole if len(others) == len(members) else _best(others) if others else None


def _elsewhere(family: str, others: Mapping[str, Shares | None]) -> Shares | None:
    """What runs on other devices say of a family, where kernels were measured alone on it."""
    found = {f: s for f, s in others.items() if s is not None and f != family}
    kept = [s.product / ALONE[f] for f, s in found.items() if f in ALONE]
    if family not in ALONE or not kept:
        return None
    copy = statistics.mean(s.copy for s in found.values())
    attention = statistics.mean(s.attention for s in found.values())
    return Shares(ALONE[family] * statistics.mean(kept), copy, attention)


def _best(tried: Sequence[_Tried]) -> Shares:
    """The shares with the least mean error, each source counting the same."""
    by_source = _grouped(tried, lambda t: t.sample.run.source)
    means = [np.mean([t.errors for t in own], axis=0) for own in by_source.values()]
    return _CHOICES[int(np.mean(means, axis=0).argmin())]


def _error(one: Sample, shares: Shares, without: Sequence[str] = ()) -> float:
    """Of the step time with these shares. without: fields of the run's system that are as in the
    catalogue (`rows.own_shares`)."""
    usual, system, known = cluster(one.run.device, 1).device, one.run.system, one.device
    if "launch_seconds" in without:
        known = replace(known, launch_seconds=usual.launch_seconds)
    if "hopper" in without and one.run.device.startswith("h100"):
        known = replace(known, product=known.product / system.hopper)
    if "attention" in without:
        known = replace(
            known,
            attention=known.attention / system.attention,
            attention_backward=known.attention_backward / system.attention,
        )
    device = replace(
        known,
        product=shares.product * known.product / usual.product,
        attention=known.attention * shares.attention,
        attention_backward=known.attention_backward * shares.attention,
        memory_bandwidth=known.memory_bandwidth * shares.copy / copies(one.run.device),
    )
    ratio = _microbatch(one, device) / _microbatch(one, one.device)
    return (one.scaled * ratio + one.rest) / one.run.seconds - 1


def _microbatch(one: Sample, device: Device) -> float:
    gap = gap_seconds(device)
    busy = sum(n * (seconds_of(w, device) + gap * w.calls) for w, n in one.works)
    return max(busy, device.launch_seconds * sum(n * w.calls for w, n in one.works))


def copies(device: str) -> float:
    """The share of the datasheet's bandwidth that the catalogue counts on."""
    paper = {
        "a100-40gb": 1.555, "a100-80gb": 2.039, "h100-80gb": 3.35, "b200-192gb": 7.7,
        "b300-288gb": 8.0, "gb200-192gb": 8.0, "gb300-288gb": 8.0,
    }  # fmt: skip
    return cluster(device, 1).device.memory_bandwidth / paper[device] / 1e12


def _family(run: Run) -> str:
    return run.device.split("-")[0]


def _grouped(samples, key):  # type: ignore[no-untyped-def]
    found = defaultdict(list)
    for one in samples:
        found[key(one)].append(one)
    return dict(sorted(found.items()))
