"""Graphs sharded over one axis against the whole graph, all ranks run side by side in float64.

Two ways to choose placements: the solver's, and at random: any placement that the rows allow must
give the same loss and gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx

from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler import as_batch
from graphaccel.passes.exact_microbatch import exact_microbatch
from graphaccel.passes.shard_axis import ShardedGraph, shard_axis
from graphaccel.planner.placements import PlacementProblem, Rates, solve_placements
from graphaccel.planner.plan import Plan
from graphaccel.rules.rows import Row
from tests.support.casts import lift_loss_cast
from tests.support.lockstep import part_of, run_ranks, whole_of
from tests.support.zoo import ALL, double

RATES = Rates(flops=1e13, memory=1e12, launch=1e-9, bandwidth=1e11, latency=1e-9)
MODELS = ("gpt", "gpt2", "bert", "t5", "llama", "vit", "swin", "resnet", "mixtral")


@cache
def captured(name: str) -> tuple[StepGraph, fx.GraphModule, list[Any]]:
    """A model's step on the whole batch, and the values of its placeholders."""
    with lift_loss_cast():
        model, batch, loss_fn = ALL[name].build()
        model, batch = double(model, batch)
        leaves = as_batch(batch)
        step = capture(model, leaves, loss_fn)
    held = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": step.forward.constants,
    }
    values = [
        leaves.leaves[s.leaf] if s.kind == "batch" else held[s.kind][s.name].detach()
        for s in step.inputs
    ]
    return step, exact_microbatch(step, Plan(devices=1, batch=8)).graph, values


def check(name: str, made: ShardedGraph, axis: str, ranks: int) -> None:
    """Loss and every gradient of all ranks together are those of the whole graph."""
    step, whole, values = captured(name)
    inputs = [
        [
            part_of(v, made.held[s.name], ranks, rank) if s.name in made.held else v
            for v, s in zip(values, step.inputs, strict=True)
        ]
        for rank in range(ranks)
    ]
    with torch.no_grad():
        wanted = whole(*values)
        got = run_ranks(made.graph.graph, inputs, [{axis: rank} for rank in range(ranks)])
    largest = max(
        float(w.abs().max())
        for w, s in zip(wanted, step.outputs, strict=True)
        if s.kind == "gradient"
    )
    for i, (true, spec) in enumerate(zip(wanted, step.outputs, strict=True)):
        if spec.kind == "output":
            continue
        result = _joined(spec.name, [r[i] for r in got], made, gradient=spec.kind == "gradient")
        error = float((result - true).abs().max())
        assert error <= 1e-10 * max(float(true.abs().max()), 1e-4 * largest), (spec, error)


def _joined(name: str, parts: list[Tensor], made: ShardedGraph, *, gradient: bool) -> Tensor:
    if gradient and name in made.partial:
        return torch.stack(parts).sum(0)
    if gradient and name in made.held:
        return whole_of(parts, made.held[name])
    for other in parts[1:]:
        assert torch.equal(other, parts[0]), f"{name} differs between ranks"
    return parts[0]


OTHERS = (("tensor", 4), ("context", 2), ("expert", 2))
CASES = [(name, "tensor", 2) for name in MODELS]
CASES += [(name, *OTHERS[i % 3]) for i, name in enumerate(MODELS)]
AT_RANDOM = [(name, ("tensor", "context", "expert")[i % 3], i) for i, name in enumerate(MODELS)]
AT_RANDOM += [(name, "tensor", 1) for name in ("bert", "t5", "vit", "swin", "mixtral")]


@pytest.mark.parametrize(("name", "axis", "ranks"), CASES)
def test_solved(name: str, axis: str, ranks: int) -> None:
    step, graph, _ = captured(name)
    placed = solve_placements(
        graph.graph, step.inputs, step.outputs, axis=axis, ranks=ranks, rates=RATES, pins={}
    )
    made = shard_axis(graph, step.inputs, step.outputs, placed, axis=axis, ranks=ranks)
    if axis == "tensor" and ranks == 2:
        assert made.held, "nothing was sharded"
    if axis == "expert" and name == "mixtral":
        assert sum("experts" in held for held in made.held) == 8, "experts of four layers"
    check(name, made, axis, ranks)


class _AtRandom(PlacementProblem):
    """Costs drawn at random: what is forbidden stays so."""

    generator: np.random.Generator

    def row_seconds(self, node: fx.Node, row: Row, work: float) -> float:
        return float(self.generator.random())

    def conversion_seconds(self, *args: Any) -> float:
        known = super().conversion_seconds(*args)
        return known if np.isinf(known) else float(self.generator.random()) * 0.2


@pytest.mark.parametrize(("name", "axis", "seed"), AT_RANDOM)
def test_any_placement(name: str, axis: str, seed: int) -> None:
    step, graph, _ = captured(name)
    problem = _AtRandom(graph.graph, step.inputs, step.outputs, axis, 2, RATES, {}, True, False)
    problem.generator = np.random.default_rng(seed)
    made = shard_axis(graph, step.inputs, step.outputs, problem.solve(), axis=axis, ranks=2)
    check(name, made, axis, 2)
