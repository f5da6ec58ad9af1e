"""Tokens sent to their experts between real processes, under other axes, stages and recomputation.

Loss and gradients in float64 are those of one device. Memory is
predicted for what the batch chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import graphaccel
from graphaccel.errors import BadPin
from tests.gloo.plans import test_axes as axes
from tests.support.captures import observed_once, packed_once
from tests.support.casts import lift_captured_casts, lift_loss_cast
from tests.support.inside import captures_in
from tests.support.parity import build, loss_of, peaks_of_a_step, tensors_alive, zoo_captures
from tests.support.pool import Pool
from tests.support.zoo import call

pytestmark = pytest.mark.multiprocess

PLANS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "stages": (4, {"expert": 2, "pipeline": 2, "microbatches": 2, "recompute": "all"}),
    "four": (4, {"expert": 4}),
    "tensor": (4, {"expert": 2, "tensor": 2}),
    "context": (4, {"expert": 2, "context": 2}),
    "fused": (4, {"expert": 2, "tensor": 2, "fusions": ("rms_norm", "swiglu")}),
    "whole": (2, {"expert": 2, "microbatches": 8}),  # an example a microbatch: on both devices
}


@pytest.mark.parametrize("plan", PLANS)
def test_one_step_is_that_of_one_device(pool: Pool, plan: str) -> None:
    world, pins = PLANS[plan]
    given = {"data": 1, "pipeline": 1, "microbatches": 1, "interleave": 1, "zero": 0}
    got = pool.run(world, axes.run_axes, "mixtral", given | {"recompute": "none"} | pins, world)
    axes.check("mixtral", got)


@pytest.mark.release
@pytest.mark.parametrize("plan", ["tensor", "four", "stages"])
def test_experts_with_biases_and_gates_between(pool: Pool, plan: str) -> None:
    world, pins = PLANS[plan]
    given = {"data": 1, "pipeline": 1, "microbatches": 1, "interleave": 1, "zero": 0}
    got = pool.run(world, axes.run_axes, "gpt_oss", given | {"recompute": "none"} | pins, world)
    axes.check("gpt_oss", got)


def _one_sided() -> tuple[float, float, dict[str, float], float]:
    """Every token chooses the same two experts, which one of two ranks holds. The loss of one
    device, this rank's, errors of its gradients, and its predicted memory as a multiple of what was
    measured."""
    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    with lift_loss_cast():
        model, batch, loss_fn = build("mixtral", "float64")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("gate.weight"):
                    parameter.zero_()
        true = loss_of(call(model, batch), batch, loss_fn)
        true.backward()
        true = true.item()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with lift_captured_casts(), observed_once("mixtral"), packed_once():
        pins = {"expert": 2, "data": 1, "pipeline": 1, "recompute": "none", "check": "off"}
        model, _ = graphaccel.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, **pins
        )
        captures_in(model).steps = zoo_captures("mixtral", "float64")
        loss = loss_of(call(model, batch), batch, loss_fn)
        loss.backward()
        loss, rank = loss.item(), torch.distributed.get_rank()
        errors = {}
        for name, parameter in model.named_parameters():
            part, found = wanted[name], parameter.grad
            if isinstance(found, torch.Tensor) and hasattr(found, "local"):
                found = found.local
            if found.shape != part.shape:
                part = part.chunk(2)[rank]
            errors[name] = float((found - part).abs().max())
        others += [value.untyped_storage() for value in wanted.values()]
        del parameter, part, found
        handle, measured = model.graphaccel, []
        for _ in range(3):  # a thread that sends may let go of a tensor late: the least is the step
            model.zero_grad()
            measured.append(peaks_of_a_step(model, batch, loss_fn, others)[0])
        predicted = handle.predicted_pass_bytes
        tried = handle.plan.prediction.chosen
        ((shares,),) = {block.shares for block in tried}
        assert sorted(shares) == [0.0, 2.0]
        said = "experts chosen as the example batch does, a device up to 2.00 of an even share"
        assert said in " ".join(handle.report().split())
        return true, loss, errors, predicted / min(measured)


def test_a_rank_whose_experts_nobody_chose(pool: Pool) -> None:
    for true, loss, errors, memory in pool.run(2, _one_sided):
        assert loss == pytest.approx(true, rel=1e-10)
        assert max(errors.values()) <= 1e-10, errors
        assert memory == pytest.approx(1, abs=0.005)


def _cut_inside() -> str:
    with lift_loss_cast():
        model, batch, loss_fn = build("mixtral", "float64")
    with lift_captured_casts(), observed_once("mixtral"), packed_once():
        pins = {"expert": 2, "data": 1, "pipeline": 2, "microbatches": 2, "cuts": ("silu_1",)}
        model, _ = graphaccel.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, **pins
        )
        captures_in(model).steps = zoo_captures("mixtral", "float64")
        try:
            call(model, batch)
        except BadPin as error:
            return str(error)
        return ""


def test_no_stage_ends_where_rows_are_with_their_experts(pool: Pool) -> None:
    for said in pool.run(4, _cut_inside):
        assert said == (
            "error[GA202]: cuts=('silu_1',) can not be planned\n"
            "  why:  one falls inside model.layers.1.mlp.experts, where rows are with the experts "
            "they chose\n"
            "  help: leave cuts out and it will be chosen for you\n"
            "  explain: graphaccel explain GA202"
        )
