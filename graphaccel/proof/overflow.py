"""Refuses a precision in which the forward of the first batch overflows, where float32 does not.

A loss that is NaN would be taken for gradients that overflowed: every step would be skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import PlanDiffers
from graphaccel.errors.messages import Location
from graphaccel.ir.values import returned, tensors_of
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name
from graphaccel.proof.comparison import Pair, Setting, graph_results, part
from graphaccel.proof.results import Results
from graphaccel.proof.sums import sums_of
from graphaccel.proof.untouched import untouched


def refuse_overflow(pair: Pair, lowered: StepGraph, computed: Results, plan: Plan) -> None:
    """Compare whether loss and outputs are finite. lowered: the step in the plan's precision;
    computed: its results, as sums.

    Raises PlanDiffers (GA109).
    """
    odd = {name for name, finite in _finite(computed) if not finite}
    if not odd:
        return
    wide = dict(_finite(graph_results(pair, sums_of)))
    lost = [name for name in sorted(odd) if wide.get(name)]
    if not lost:
        return
    dtype = plan.precision.compute
    node = _first(replace(pair, step=lowered))
    line = None if node is None else node.meta.get("location")
    raise PlanDiffers(
        plan=plan_name(plan),
        values=tuple(f"{name}: infinite or NaN in {dtype}, finite in float32" for name in lost),
        overflow=dtype,
        location=None if line is None else Location(*line),
    )


def _finite(results: Results) -> Iterator[tuple[str, bool]]:
    """Loss and outputs, and whether all of their numbers are finite."""
    if results.loss is not None:
        yield "loss", math.isfinite(results.loss[0])
    for leaf, (square, _) in results.outputs.items():
        yield f"output {leaf}", math.isfinite(square)


def _first(pair: Pair) -> fx.Node | None:
    """Where the infinities and NaNs of the step's loss or outputs come from: a node that makes them
    of finite numbers."""
    odd: set[fx.Node] = set()

    def observe(node: fx.Node, value: Any) -> None:
        tensors = [t for t in tensors_of(value) if t.is_floating_point()]
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            odd.add(node)

    batch = part(pair.batch, pair.step, Setting(), pair.subject.device)
    with untouched(pair.subject.model):
        pair.graph(batch, Setting(), observe, keep=sums_of)
    results = zip(pair.step.outputs, returned(pair.step.graph), strict=True)
    node = next((n for spec, n in results if spec.kind in ("loss", "output") and n in odd), None)
    while node is not None and (sources := [n for n in node.all_input_nodes if n in odd]):
        node = sources[0]
    return node
