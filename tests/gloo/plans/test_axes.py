"""Stages sharded over tensor, context and expert axes, on real processes, without an optimizer.

The executor runs the programs on local parts of the parameters; loss and gradients, put together
again from all ranks, are those of one device in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphaccel.api import cluster_here
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.schedules import schedule_of
from graphaccel.dispatch.together import choose_together
from graphaccel.ir.program import Sharded, StepProgram
from graphaccel.kernels.register import fusion_of
from graphaccel.planner.plan.axis_order import coordinates
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.broadcast import share_capture
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.state import Held
from graphaccel.runtime.mesh import build_mesh
from graphaccel.sharding.rules.shard import Shard
from tests.support.captures import observed_once, packed_once, read_captures, write_captures
from tests.support.casts import lift_captured_casts, lift_loss_cast
from tests.support.lockstep import part_of, whole_of
from tests.support.parity import Reference, build, reference
from tests.support.pool import Pool
from tests.support.zoo import ALL

PLANS: Mapping[str, tuple[int, dict[str, int]]] = {
    "tensor2": (2, {"tensor": 2}),
    "tensor4": (4, {"tensor": 4}),
    "context2": (2, {"context": 2}),
    "expert2": (2, {"expert": 2}),
    "tensor2-data2": (4, {"tensor": 2, "data": 2}),
    "tensor2-pipeline2": (4, {"tensor": 2, "pipeline": 2, "microbatches": 2}),
    "expert2-data2": (4, {"expert": 2, "data": 2}),
    "tensor2-context2": (4, {"tensor": 2, "context": 2}),
    "tensor2-data2-pipeline2": (8, {"tensor": 2, "data": 2, "pipeline": 2, "microbatches": 2}),
}
MODELS = ("gpt", "gpt2", "bert", "t5", "llama", "vit", "swin", "resnet", "mixtral")
QUICK = (
    "tensor2", "context2", "tensor2-pipeline2", "tensor2-data2", "tensor2-context2", "expert2"
)  # fmt: skip
CASES = [(name, QUICK[(i + k) % 6]) for i, name in enumerate(MODELS) for k in (0, 3)]


def pins_for(model: str, plan: str, recompute: str = "none") -> tuple[int, dict[str, Any]]:
    """World size and pins; a model that mixes rows (BatchNorm) has one microbatch."""
    world, pins = PLANS[plan]
    given = {"data": 1, "pipeline": 1, "microbatches": 1, "interleave": 1, "zero": 0}
    return world, given | {"recompute": recompute} | pins | (
        {"microbatches": 1} if ALL[model].mixes_rows else {}
    )


def _part(value: Tensor, splits: Sequence[Sharded], plan: Plan, at: Mapping[str, int]) -> Tensor:
    for split in splits:
        shard = Shard(split.dim, split.outer)
        value = part_of(value, shard, getattr(plan, split.axis), at[split.axis])
    return value


def run_axes(name: str, pins: dict[str, Any], world: int) -> dict[str, Any]:
    """One step of this rank: loss, gradients as this rank has them, and where they belong."""
    with lift_loss_cast():
        model, batch, loss_fn = build(name, "float64")
    with lift_captured_casts(), observed_once(name), packed_once():
        leaves = as_batch(batch)
        cluster = cluster_here(world, torch.device("cpu"))
        compiler = Compiler(Model(model, loss_fn, 2.0), cluster, pins)
        compiler.captures.steps = _captures(name)
        share_capture(
            compiler.captures.knows(leaves),
            name,
            lambda: compiler.capture(leaves)[0],
            lambda step: compiler.captures.keep(leaves, step),
        )
        write_captures(f"{name} float64 True", compiler.captures.steps)
        chosen = choose_together(compiler, leaves, world)
        step, plan, program = chosen.step, chosen.plan, chosen.program
    mesh = build_mesh(plan, program.shared.values(), torch.device("cpu"), timedelta(seconds=300))
    at = coordinates(mesh.sizes, dist.get_rank())
    parameters = {
        n: _part(p.detach(), program.parameter_shards.get(n, ()), plan, at)
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    held = Held(
        parameters,
        dict(model.named_buffers(remove_duplicate=False)),
        step.forward.constants,
    )
    executor = Executor(program, schedule_of(plan, program), mesh, held, plan.microbatches)
    result = executor.run(leaves.leaves)
    assert result.loss is not None
    return {
        "loss": result.loss.item(),
        "grads": result.gradients,
        "at": at,
        "parameter_shards": dict(program.parameter_shards),
        "sizes": dict(mesh.sizes),
        "fused": sorted(_fused(program)),
    }


def _fused(program: StepProgram) -> set[str]:
    """Names of the fused ops in the stages of a program."""
    graphs = [s.forward.graph for s in program.stages]
    found = (fusion_of(n.target) for g in graphs for n in g.nodes)
    return {f.name for f in found if f is not None}


@cache
def _captures(name: str) -> dict[Any, Any]:
    """The captures of one zoo model that this worker has, one for all plans."""
    found: dict[Any, Any] = {}
    read_captures(f"{name} float64 True", found)
    return found


def _whole(name: str, got: Sequence[dict[str, Any]]) -> list[Tensor]:
    """A gradient from the ranks that have it, once for every replica."""
    splits = got[0]["parameter_shards"].get(name, ())
    have = [r for r in got if name in r["grads"]]

    def joined(ranks: list[dict[str, Any]], left: Sequence[Sharded]) -> Tensor:
        if not left:
            return ranks[0]["grads"][name]
        first, *rest = left
        size = got[0]["sizes"][first.axis]
        parts = [joined([r for r in ranks if r["at"][first.axis] == i], rest) for i in range(size)]
        return whole_of(parts, Shard(first.dim, first.outer))

    used = {s.axis for s in splits}
    replicas: dict[tuple, list[dict[str, Any]]] = {}
    for r in have:
        key = tuple(v for axis, v in sorted(r["at"].items()) if axis not in used)
        replicas.setdefault(key, []).append(r)
    return [joined(ranks, splits) for ranks in replicas.values()]


@cache
def _reference(name: str) -> Reference:
    return reference(name, "float64", 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize("by", ["heads", "sequence"])
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "context2"),
        ("bert", "tensor2-context2"),
        ("bert", "context2"),
        ("t5", "context2"),
    ],
)
def test_attention_by_heads_and_along_queries(pool: Pool, name: str, plan: str, by: str) -> None:
    """Causal and whole, with one head of keys for several queries, with a bias that is learned."""
    world, pins = pins_for(name, plan)
    check(name, pool.run(world, run_axes, name, pins | {"context_by": by}, world))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_one_step_is_that_of_one_device(pool: Pool, name: str, plan: str) -> None:
    again = "all" if (name, plan) == ("llama", "context2") else "none"  # and its gathers
    world, pins = pins_for(name, plan, again)
    got = pool.run(world, run_axes, name, pins, world)
    check(name, got)


def check(name: str, got: Sequence[dict[str, Any]]) -> None:
    """Loss and every gradient within 1e-10 of eager's, on every replica."""
    expected = _reference(name)
    for rank in got:
        assert rank["loss"] == pytest.approx(expected.loss, rel=1e-10)
    largest = max(float(g.abs().max()) for g in expected.grads.values())
    names = {expected.first_name[n] for n in expected.grads}
    for first in sorted(names):
        true = expected.grads[first]
        found = _whole(first, got)
        assert found, f"no rank has the gradient of {first}"
        for gradient in found:
            error = float((gradient - true).abs().max())
            assert error <= 1e-10 * max(float(true.abs().max()), 1e-4 * largest), (first, error)
