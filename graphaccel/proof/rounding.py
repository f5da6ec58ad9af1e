"""How far rounding takes the results of one device from each other.

A deep network with BatchNorm over a few values amplifies the rounding of its first layers, until
values near zero pass a ReLU in one order of summation and not in another: gradients then differ by
per cents. Where a plan's step differs from one device's, one device computes the step several times
with weights moved by one unit of rounding: what that changes, the plan may change as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.passes.pipeline import prepared
from graphaccel.planner.plan.plan import Plan
from graphaccel.proof.comparison import Pair, Setting, draws, part
from graphaccel.proof.constant_draws import ConstantDraws
from graphaccel.proof.first_step import affordable
from graphaccel.proof.graph_step import GraphFailed
from graphaccel.proof.planned import Expected, named_sums
from graphaccel.proof.results import Results
from graphaccel.proof.sums import sums_of
from graphaccel.proof.untouched import untouched
from graphaccel.runtime.execution.answers import from_first


def rounding_together(
    expected: Expected,
    pair: Callable[[], Pair | str] | None,
    plan: Plan,
    ranks: int,
    seeds: range,
) -> Mapping[str, float]:
    """The largest relative change of each of one device's float32 values, except of buffers, which
    the step may have written since; by name, and empty where it is not known. Computed on rank 0
    for all: a collective.

    pair: the model on full weights with the batch that was expected; None where no rank has it.
    seeds: one for each time that the weights are moved.
    """
    said: list[Any] = [{}]
    if pair is not None and expected.dtype == "float32" and (ranks == 1 or dist.get_rank() == 0):
        given = pair()
        if isinstance(given, Pair) and given.of is None and affordable(given, Setting()):
            said = [_errors(expected, given, plan, seeds)]
    if ranks > 1:
        said = [from_first(said[0], "the rounding of the first step on rank 0")]
    return said[0]


def _errors(expected: Expected, pair: Pair, plan: Plan, seeds: range) -> dict[str, float]:
    pair = replace(pair, step=prepared(pair.step, replace(plan, fusions=())))
    if draws(pair.step) and not expected.constant:
        return {}  # others would be drawn now
    changes: dict[str, float] = {}
    try:
        for seed in seeds:
            moved = named_sums(_moved(pair, seed, constant=expected.constant), plan)
            for name in expected.values:
                if name in moved and not name.startswith("new value"):
                    error = expected.error(name, moved[name])
                    changes[name] = max(error, changes.get(name, 0.0))
    except (GraphFailed, torch.OutOfMemoryError):
        return {}
    return changes


def _moved(pair: Pair, seed: int, *, constant: bool) -> Results:
    """The results of the graph, kept as sums, with each weight one unit of rounding higher, lower
    or as it is."""
    model, device = pair.subject.model, pair.subject.device
    generator = torch.Generator().manual_seed(seed)
    batch = part(pair.batch, pair.step, Setting(), device)
    with untouched(model), ConstantDraws() if constant else nullcontext():
        for parameter in nn.Module.parameters(model):
            value = parameter.data
            if value.is_floating_point():
                steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
                parameter.data = value + steps * value.abs() * torch.finfo(value.dtype).eps
        return pair.graph(batch, Setting(), keep=sums_of)
