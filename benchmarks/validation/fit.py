"""The shares of `planner.cluster.catalogue` that published runs support, and how well they hold
elsewhere.

For each family of devices four numbers: what large products reach of the peak, in 16 and in 8 bits,
what a copy reaches of the memory's bandwidth, and fused attention (forward and backward alike, as a
factor on what was measured alone). Blackwells are one family: chips alike, in machines that give
them 1,000 to 1,400 W, which is what limits large products. Their share is that of a B200; others
are as much faster as the catalogue says (`planner.cluster.catalogue.by_power`). They are those of a
grid with the least mean error, each source counting the same; the share of 8 bits is fitted last,
on runs that have them, and the others on those that have none. And the host time of systems that
start operations eagerly (`launch_seconds` in `systems`), which those share; and of those that start
parts of a mixture so (`started`), another framework on other hosts: what the others say of it
stands for it where none is left. What lies between operations that are traced (`traced.GAP`) is
what lies between any where the source that traces is left out; and a process that schedules two
microbatches beside each other (`systems.SCHEDULED`) is as fast as any where none of them is left.

Then each source, a document with all of its releases, is left out, and predicted with what the
others say, in all of that. Where none of them ran on the device, or none so, it is what kernels
reach when measured alone (`ALONE`), times what runs of the other families reach of that: a device
that trains is hotter and shares its memory.

Changing a share scales the time of a microbatch, by all of its nodes; what is sent stays.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, TypeVar

from benchmarks.validation.experts import NOTHING_STARTED, Started
from benchmarks.validation.predict import Predicted
from benchmarks.validation.rows import Run, document
from benchmarks.validation.systems import EAGER_LAUNCH, SCHEDULED, STARTED_LAUNCH, own_shares
from benchmarks.validation.traced import GAP, Segment, seconds
from graphaccel.planner.cluster.catalogue import KILOWATTS, cluster
from graphaccel.planner.cluster.cluster import Device
from graphaccel.planner.profile.efficiency import Work, gap_seconds, seconds_of

# Shares of the peak of large products, measured alone, in 16 and in 8 bits. 16: SimuMax's
# configs/system. 8: Azure/AI-benchmarking-guide, cuBLASLt at 16384: 1377 TFLOP/s of 1979 on H100,
# 2907 of 5000 on the B200 of a GB200.
ALONE = {"a100": 0.77, "b200": 0.51}
ALONE_8_BITS = {"h100": 0.70, "b200": 0.58}
ATTENTION = {"a100": 0.8, "h100": 0.6, "b200": 0.71}  # likewise, forward, in 16 bits
_MATMULS = [n / 100 for n in range(40, 84, 2)]
_COPIES = (0.6, 0.7, 0.8, 0.9)
_ATTENTION = (0.8, 1.0, 1.2)
_LAUNCHES = (7e-6, 2e-5, 3e-5, *(n * 1e-6 for n in range(40, 82, 2)))
T = TypeVar("T")
_ROUNDS = 2  # of fitting shares and launches in turn


@dataclass(frozen=True)
class Sample:
    """A run with its prediction, taken apart: what a microbatch asks of the device, what scales
    with that, and the rest of the step. pieces: of a system that traced such (`traced`). started:
    what its process starts one by one (`experts`)."""

    run: Run
    device: Device
    works: Sequence[tuple[Work, float]]
    scaled: float
    rest: float
    pieces: tuple[Segment, ...] = ()
    started: Started = NOTHING_STARTED

    @property
    def eager(self) -> str:
        """What of `Starts` it depends on, as it takes as long as its process may; "" none."""
        if self.run.system.launch_seconds is not None:
            return "every"
        return "parts" if self.started.count > 0 else ""


@dataclass(frozen=True)
class Starts:
    """Host seconds to start an operation where all are started eagerly, and where parts of a
    mixture are; a device's between two that are traced; and how many times as long a process takes
    that schedules two microbatches beside each other."""

    every: float = EAGER_LAUNCH
    parts: float = STARTED_LAUNCH
    between: float = GAP
    scheduled: float = SCHEDULED

    def of(self, one: Sample) -> float:
        """Those of a sample; 0 where it takes no longer for them."""
        return getattr(self, one.eager) if one.eager else 0.0


@dataclass(frozen=True)
class Shares:
    """What is fitted of a family."""

    product: float
    copy: float
    attention: float
    eight_bits: float = 0.0


_CHOICES = tuple(Shares(*choice) for choice in product(_MATMULS, _COPIES, _ATTENTION))


@dataclass(frozen=True)
class Found:
    """Shares by family, and host times."""

    families: Mapping[str, Shares]
    starts: Starts


def sample(run: Run, predicted: Predicted) -> Sample:
    """A prediction, ready to be made again with other shares."""
    parts = predicted.plan.prediction
    assert parts is not None
    scaled, works = parts.compute + parts.bubble, predicted.works()
    rest = predicted.seconds - scaled
    device = predicted.where.device
    return Sample(run, device, works, scaled, rest, predicted.pieces, predicted.started)


def fitted(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of each family its shares and runs. Of each source the mean error of the step time with what
    all runs support ("fitted") and with what the others say ("left_out": None where nothing says
    anything of the device); "without": what of its system was left out with it."""
    errors = _Errors()
    found = _found(samples, errors)
    fit: dict[str, list[float]] = defaultdict(list)
    left: dict[str, list[float] | None] = {}
    without: dict[str, tuple[str, ...]] = {}
    for name, members in _grouped(samples, _document).items():
        others = _found([s for s in samples if _document(s) != name], errors)
        for one in members:
            shown, family = one.run.reported, _family(one.run)
            shares = found.families[family]
            fit[shown].append(abs(errors.of(one, shares, found.starts)))
            apart = others.families.get(family) or _elsewhere(family, others.families)
            without[shown] = own_shares(one.run.source)
            if apart is None:
                left[shown] = None
            elif (known := left.setdefault(shown, [])) is not None:
                known.append(abs(errors.of(one, apart, others.starts)))
    return {
        "launch_seconds": found.starts.every,
        "started_seconds": found.starts.parts,
        "families": {
            name: {**asdict(found.families[name]), "runs": len(members)}
            for name, members in _grouped(samples, lambda s: _family(s.run)).items()
        },
        "sources": {
            name: {
                "runs": len(each),
                "fitted": statistics.mean(each),
                "left_out": _mean(left[name]),
                "without": list(without[name]),
            }
            for name, each in sorted(fit.items())
        },
    }


def text(figures: dict[str, Any]) -> str:
    """The figures of `fitted` as lines."""
    lines = [
        f"{name}: products {f['product']:.2f} of the peak, {f['eight_bits']:.2f} in 8 bits, copies "
        f"{f['copy']:.2f} of the bandwidth, attention x {f['attention']:.1f}; {f['runs']} runs"
        for name, f in figures["families"].items()
    ]
    lines.append(
        f"eager: {1e6 * figures['launch_seconds']:.0f} us to start an operation, "
        f"{1e6 * figures['started_seconds']:.0f} in parts of mixtures"
    )
    lines.append("mean |error| of the step time, fitted on all and with the source left out:")
    for name, f in figures["sources"].items():
        apart = "   none " if f["left_out"] is None else f"{100 * f['left_out']:5.1f} %"
        own = f", without its {' and '.join(f['without'])}" if f["without"] else ""
        lines.append(f"{f['runs']:5} runs  {100 * f['fitted']:5.1f} %  {apart}  {name}{own}")
    return "\n".join(lines)


def _mean(errors: Sequence[float] | None) -> float | None:
    return None if errors is None else statistics.mean(errors)


class _Errors:
    """How far samples are off, kept once known."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def of(self, one: Sample, shares: Shares, starts: Starts) -> float:
        """See `_error`."""
        launch, between = starts.of(one), starts.between if one.pieces else 0.0
        scheduled = starts.scheduled if one.started.scheduled else 1.0
        if not one.run.products:
            shares = replace(shares, eight_bits=0.0)
        key = id(one), shares, launch, between, scheduled
        if key not in self._known:
            self._known[key] = _error(one, shares, Starts(launch, launch, between, scheduled))
        return self._known[key]


def _found(samples: Sequence[Sample], errors: _Errors) -> Found:
    """What these runs support."""
    # Nothing else says how long a device waits that is traced.
    between = GAP if any(s.pieces for s in samples) else gap_seconds(cluster("a100-80gb", 1).device)
    scheduled = SCHEDULED if any(s.started.scheduled for s in samples) else 1.0
    starts = Starts(_LAUNCHES[0], _LAUNCHES[0], between, scheduled)
    found = _whole(samples, errors, starts)
    if any(s.eager for s in samples):
        for _ in range(_ROUNDS):
            starts = _starts(samples, found, errors, starts)
            found = _whole(samples, errors, starts)
    for name, own in _grouped(samples, lambda s: _family(s.run)).items():
        few = [s for s in own if s.run.products]
        if few and name in found:
            choices = [replace(found[name], eight_bits=share) for share in _MATMULS]
            found[name] = _best(few, choices, lambda s, x: errors.of(s, x, starts))
    return Found(_with_eight_bits(found), starts)


def _starts(
    samples: Sequence[Sample], found: Mapping[str, Shares], errors: _Errors, known: Starts
) -> Starts:
    """With the host times of an operation that runs support; where none says one, the other's."""
    best = {}
    for kind, own in _grouped(samples, lambda s: s.eager).items():
        choices = [replace(known, every=launch, parts=launch) for launch in _LAUNCHES]
        if kind:
            chosen = _best(own, choices, lambda s, x: errors.of(s, found[_family(s.run)], x))
            best[kind] = chosen.every
    other = next(iter(best.values()))
    return replace(known, every=best.get("every", other), parts=best.get("parts", other))


def _whole(samples: Sequence[Sample], errors: _Errors, starts: Starts) -> dict[str, Shares]:
    """Shares of families, as runs say that have no matmuls in 8 bits."""
    found = {}
    families = _grouped(samples, lambda s: _family(s.run))
    for name, own in families.items():
        whole = [s for s in own if not s.run.products]
        if whole:
            found[name] = _best(whole, _CHOICES, lambda s, x: errors.of(s, x, starts))
    for name in families:
        if name not in found and (apart := _elsewhere(name, found)) is not None:
            found[name] = apart
    return found


def _with_eight_bits(found: Mapping[str, Shares]) -> dict[str, Shares]:
    """Where no run says what matmuls in 8 bits reach, what others reach of it says so."""
    kept = [s.eight_bits / ALONE_8_BITS[f] for f, s in found.items()
            if f in ALONE_8_BITS and s.eight_bits]  # fmt: skip

    def told(family: str, shares: Shares) -> float:
        if shares.eight_bits or family not in ALONE_8_BITS or not kept:
            return shares.eight_bits or shares.product
        return ALONE_8_BITS[family] * statistics.mean(kept)

    return {name: replace(s, eight_bits=told(name, s)) for name, s in found.items()}


def _elsewhere(family: str, others: Mapping[str, Shares]) -> Shares | None:
    """What runs on other devices say of a family, where kernels were measured alone on it."""
    found = {f: s for f, s in others.items() if f != family}
    kept = [s.product / ALONE[f] for f, s in found.items() if f in ALONE]
    if family not in ALONE or not kept:
        return None
    copy = statistics.mean(s.copy for s in found.values())
    attention = statistics.mean(s.attention for s in found.values())
    shares = Shares(ALONE[family] * statistics.mean(kept), copy, attention)
    return _with_eight_bits({**found, family: shares})[family]


def _best(
    samples: Sequence[Sample], choices: Sequence[T], error: Callable[[Sample, T], float]
) -> T:
    """The choice with the least mean error, each source counting the same."""
    by_source = _grouped(samples, _document).values()

    def mean(choice: T) -> float:
        return statistics.mean(
            statistics.mean(abs(error(s, choice)) for s in own) for own in by_source
        )

    return min(choices, key=mean)


def _error(one: Sample, shares: Shares, starts: Starts) -> float:
    """Of the step time with these shares and host times."""
    usual, known = cluster(one.run.device, 1).device, one.device
    if one.run.system.launch_seconds is not None:
        known = replace(known, launch_seconds=starts.every)
    first = cluster("b200-192gb", 1).device if _family(one.run) == "b200" else usual
    few_bits = usual.product_8_bits / first.product_8_bits if first.product_8_bits else 1.0
    attention = shares.attention * ATTENTION[_family(one.run)] / usual.attention
    device = replace(
        known,
        product=shares.product * known.product / first.product,
        product_8_bits=shares.eight_bits * few_bits * one.run.system.scaled,
        attention=known.attention * attention,
        attention_backward=known.attention_backward * attention,
        memory_bandwidth=known.memory_bandwidth * shares.copy / copies(one.run.device),
    )
    told = _microbatch(one, one.device, Starts())
    ratio = _microbatch(one, device, starts) / told
    return (one.scaled * ratio + one.rest) / one.run.seconds - 1


def _microbatch(one: Sample, device: Device, starts: Starts) -> float:
    if one.pieces:
        return seconds(one.pieces, device, device.launch_seconds, starts.between)
    gap = gap_seconds(device)
    busy = sum(n * (seconds_of(w, device) + gap * w.calls) for w, n in one.works)
    whole = max(busy, device.launch_seconds * sum(n * w.calls for w, n in one.works))
    return whole + one.started.waits(device, starts.parts, starts.scheduled)


def copies(device: str) -> float:
    """The share of the datasheet's bandwidth that the catalogue counts on."""
    paper = {
        "a100-40gb": 1.555, "a100-80gb": 2.039, "h100-80gb": 3.35, "b200-192gb": 7.7,
        "b300-288gb": 8.0, "gb200-192gb": 8.0, "gb300-288gb": 8.0,
    }  # fmt: skip
    return cluster(device, 1).device.memory_bandwidth / paper[device] / 1e12


def _document(one: Sample) -> str:
    return document(one.run.source)


def _family(run: Run) -> str:
    """The chip: all Blackwells are alike but for the power of their machines."""
    machine = _machine(run)
    return "b200" if machine in KILOWATTS else machine


def _machine(run: Run) -> str:
    return run.device.split("-")[0]


def _grouped(samples, key):  # type: ignore[no-untyped-def]
    found = defaultdict(list)
    for one in samples:
        found[key(one)].append(one)
    return dict(sorted(found.items()))
