"""A step for which the device has no memory: what was predicted, what is there, and what to pin."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphaccel
from graphaccel import errors
from graphaccel.runtime.execution.executor import Executor
from graphaccel.runtime.execution.out_of_memory import is_out_of_memory
from tests.support.small import Classifier, small_batch


def test_predicted_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=1, check="off", example_batch=small_batch())
    run = Executor.run_action

    def fails(self: Executor, action: Any, state: Any) -> None:
        if action.kind == "backward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        run(self, action, state)

    monkeypatch.setattr(Executor, "run_action", fails)
    with pytest.raises(errors.DeviceOutOfMemory) as caught:
        model(*small_batch())
    assert caught.value.predicted["tensors"] == model.graphaccel.predicted_peak_bytes
    assert caught.value.actual["free"] > 0
    lines = str(caught.value).splitlines()
    assert lines[0] == "error[GA502]: stage 0 ran out of memory during backward of microbatch 0"
    assert [line.split()[0] for line in lines[1:]] == [
        "predicted", "tensors", "other", "free", "help:", "help:", "explain:",
    ]  # fmt: skip
    assert lines[-3].endswith("graphaccel.optimize(model, optimizer, recompute='all')")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    monkeypatch.undo()
    model(*small_batch()).backward()  # and it goes on


def test_the_allocator_of_the_host() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
