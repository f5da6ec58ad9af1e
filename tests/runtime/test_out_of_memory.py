"""A step for which the device has no memory: what was predicted, what is there, and what to pin."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel import errors
from graphaccel.compiler.compiler import Compiler, Planned
from graphaccel.compiler.model import as_batch, model_of
from graphaccel.compiler.smaller_plan import smaller_plan
from graphaccel.errors.messages import format_bytes
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.search.record import Record
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.out_of_memory import is_out_of_memory
from tests.gloo.scripts.test_semantics import gpt, tokens
from tests.support.small import Classifier, small_batch


def _ran_out(
    monkeypatch: pytest.MonkeyPatch, model: Any, batch: Any, **pins: Any
) -> errors.DeviceOutOfMemory:
    """The error of a step whose backward finds no memory."""
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=1, check="off", example_batch=batch, **pins)
    run = Executor.run_action

    def fails(self: Executor, action: Any, state: Any) -> None:
        if action.kind == "backward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        run(self, action, state)

    monkeypatch.setattr(Executor, "run_action", fails)
    with pytest.raises(errors.DeviceOutOfMemory) as caught:
        model(**batch) if isinstance(batch, dict) else model(*batch)
    monkeypatch.undo()
    return caught.value


def test_predicted_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier()
    error = _ran_out(monkeypatch, model, small_batch())
    assert error.predicted["tensors"] == model.graphaccel.predicted_peak_bytes
    assert error.actual["free"] > 0
    lines = str(error).splitlines()
    assert lines[0] == "error[GA502]: stage 0 ran out of memory during backward of microbatch 0"
    assert [line.split()[0] for line in lines[1:]] == [
        "predicted", "tensors", "other", "free", "help:", "help:", "explain:",
    ]  # fmt: skip
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    model(*small_batch()).backward()  # and it goes on


def test_the_pins_that_are_named_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = gpt(4), tokens()
    error = _ran_out(monkeypatch, model, batch, microbatches=1, recompute="none")
    assert error.smaller is not None
    needed, instead = error.smaller
    assert needed <= 0.9 * instead
    given = ", ".join(f"{name}={value!r}" for name, value in error.pins.items())
    lines = str(error).splitlines()
    assert lines[-3] == (
        f"  help: predicted to need {format_bytes(needed)} in tensors on its fullest rank, "
        f"this plan {format_bytes(instead)}:  graphaccel.optimize(model, optimizer, {given})"
    )
    other = gpt(4)
    optimizer = torch.optim.AdamW(other.parameters())
    graphaccel.optimize(other, optimizer, devices=1, check="off", example_batch=batch, **error.pins)
    mine, theirs = (m.graphaccel.predicted_peak_bytes for m in (model, other))
    assert theirs < 0.95 * mine


class Full(torch.optim.SGD):
    """Its state does not fit."""

    def step(self, closure: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("fails", "doing"),
    [(False, "the optimizer's step"), (True, "the script's own code")],
)
def test_outside_of_a_step_the_prediction_is_said_behind_the_error(
    fails: bool, doing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(2):  # of several models it is said once
        model = Classifier()
        optimizer = Full(model.parameters(), lr=0.1)
        graphaccel.optimize(model, optimizer, devices=1, example_batch=small_batch())
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as caught:
        torch.empty(1 << 60) if fails else optimizer.step()
    assert not isinstance(caught.value, errors.GraphAccelError)
    capsys.readouterr()
    sys.excepthook(caught.type, caught.value, caught.value.__traceback__)
    said = capsys.readouterr().err
    assert said.count("error[GA502]") == 1
    assert said.index("Traceback") < said.index(f"GA502]: stage 0 ran out of memory during {doing}")
    assert "predicted" in said
    sys.excepthook(ValueError, ValueError("another"), None)
    assert "GA502" not in capsys.readouterr().err


def test_no_pin_is_named_where_none_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Flatten(0))
    x = torch.zeros(1, 512)
    error = _ran_out(monkeypatch, model, (x,), loss_fn=lambda out: out.sum())
    assert error.smaller is None
    assert "recompute='all'" in str(error)


def test_beside_a_gpu_the_host_may_hold_optimizer_state() -> None:
    model, batch = nn.Sequential(nn.Linear(512, 512), nn.Flatten(0)), as_batch(torch.zeros(1, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    built = model_of(model, lambda out: out.sum(), optimizer, "cuda")

    def planned(where: Cluster, pins: dict[str, Any]) -> tuple[Compiler, Planned]:
        compiler = Compiler(built, where, pins)
        return compiler, compiler.choose(batch, Record())

    gpu = cluster("h100-80gb", 1)
    smaller = smaller_plan(*planned(gpu, {}), None)
    assert smaller is not None
    assert smaller.pins == {"offload": "optimizer"}
    prediction = planned(gpu, smaller.pins)[1].plan.prediction
    assert prediction is not None
    assert prediction.memory[0].tensors == pytest.approx(smaller.tensors, rel=1e-3)
    assert smaller.tensors < 0.9 * smaller.instead_of
    assert gpu.host is not None
    small = replace(gpu, host=replace(gpu.host, memory=2**20))
    assert smaller_plan(*planned(small, {}), None) is None
    assert smaller_plan(*planned(gpu, {"offload": "optimizer"}), None) is None


def test_the_allocator_of_the_host() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
