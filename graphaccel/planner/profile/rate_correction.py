"""Corrects a cluster's rates by measured steps, beside the catalogue and timed ops.

For a step that was predicted to compute for C seconds (including the pipeline bubble), to
communicate for M exposed seconds and to run the optimizer for O, and that took T and then S:

    T = c C + m M        S = o O

Every rate of the device is divided by c, every rate of its links by m, and the optimizer's step is
given o. All predictions are functions of rates, lower bounds as well, so all change in the same
way: a lower bound stays one. One step can not separate c from m: where it communicates, c = m,
which reproduces its own seconds exactly, and what overlaps with what; where it does not, m = 1.
Several steps are fitted by the least squares of (c C + m M) / T - 1, with c and m tied together by
a hundredth of a step.

A step corrects predictions of its own model in its own precision, whatever their batch and plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.cluster.cluster import Cluster, Device, Link, StepTime
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan, Precision
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.profile.profile import Profile

_TOGETHER = 0.01
_FOLLOWED = (1, 2)  # ZeRO levels whose optimizer step is followed by all-gathers


@dataclass(frozen=True)
class Scales:
    """The factors by which compute, communication and the optimizer's step take longer than
    predicted."""

    compute: float
    communication: float
    optimizer: float


def model_key(profile: Profile) -> str:
    """A key that is equal for any batch of a model: a hash of its parameters' names and bytes."""
    known = sorted((p.name, p.bytes) for p in profile.parameters)
    return hashlib.sha256(repr(known).encode()).hexdigest()[:16]


def precision_name(precision: Precision) -> str:
    """The name of a precision in the notation of its pin."""
    return next(name for name, one in PRECISIONS.items() if one == precision)


def refined(cluster: Cluster, model: str, precision: str) -> Cluster:
    """The cluster with its rates corrected by its steps of a model (`model_key`) in a precision;
    unchanged without any, and where they are already corrected."""
    own = tuple(s for s in cluster.steps if (s.model, s.precision) == (model, precision))
    if not own or cluster.refined_by:
        return cluster
    by = scales(own)
    return replace(
        cluster,
        device=_slower(cluster.device, by),
        links=tuple(_slower_link(link, by.communication) for link in cluster.links),
        refined_by=own,
    )


def scales(steps: Sequence[StepTime]) -> Scales:
    """The factors that fit the steps; there is at least one step."""
    rows = [_row(step) for step in steps]
    compute, communication = _fitted(np.array(rows))
    stepped = [s for s in steps if s.optimizer_took and s.optimizer]
    ratios = [math.log(s.optimizer_took / s.optimizer) for s in stepped]
    optimizer = math.exp(sum(ratios) / len(ratios)) if ratios else compute
    return Scales(compute, communication, optimizer)


def with_step(cluster: Cluster, step: StepTime) -> Cluster:
    """A cluster with one more step, which replaces an earlier one of the same plan."""

    def same(other: StepTime) -> bool:
        return all(
            getattr(other, name) == getattr(step, name)
            for name in ("model", "precision", "plan", "devices")
        )

    return replace(cluster, steps=(*(s for s in cluster.steps if not same(s)), step))


def step_time(
    plan: Plan,
    predicted: Prediction,
    model: str,
    name: str,
    took: float,
    optimizer_took: float,
) -> StepTime:
    """A measured step of `plan` for a file. predicted: by the cluster's own rates. took: seconds of
    the full step; optimizer_took: those of the optimizer among them."""
    apart = (plan.shards == 1 or plan.zero not in _FOLLOWED) and optimizer_took < took
    alone = optimizer_took if apart else 0.0
    return StepTime(
        model,
        name,
        precision_name(plan.precision),
        plan_name(plan),
        plan.devices,
        predicted.compute + predicted.bubble,
        predicted.communication,
        predicted.optimizer,
        took - alone,
        alone,
    )


def _row(step: StepTime) -> tuple[float, float]:
    """Compute and communication as shares of the measured time."""
    more = 0.0 if step.optimizer_took else step.optimizer
    return (step.compute + more) / step.took, step.communication / step.took


def _fitted(rows: np.ndarray) -> tuple[float, float]:
    """(c, m), both above 0, for which the rows' sums are as near to 1 as possible."""
    if not rows[:, 1].any():
        return float(rows[:, 0].sum() / np.square(rows[:, 0]).sum()), 1.0
    tied = np.vstack([rows, [_TOGETHER, -_TOGETHER]])
    (c, m), *_ = np.linalg.lstsq(tied, np.append(np.ones(len(rows)), 0.0), rcond=None)
    if min(c, m) <= 0:  # the steps do not separate them
        whole = rows.sum(axis=1)
        c = m = whole.sum() / np.square(whole).sum()
    return float(c), float(m)


def _slower(device: Device, by: Scales) -> Device:
    times = by.compute
    return replace(
        device,
        peak_flops={dtype: rate / times for dtype, rate in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth / times,
        launch_seconds=device.launch_seconds * times,
        measured=tuple(replace(row, seconds=row.seconds * times) for row in device.measured),
        stepping=device.stepping * by.optimizer / times,
    )


def _slower_link(link: Link, times: float) -> Link:
    rows = tuple(
        replace(row, latency_seconds=row.latency_seconds * times, bandwidth=row.bandwidth / times)
        for row in link.measured
    )
    hop, rate = link.latency_seconds * times, link.bandwidth / times
    return replace(link, latency_seconds=hop, bandwidth=rate, measured=rows)
