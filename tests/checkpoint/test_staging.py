"""Host copies of an asynchronous save: their memory is allocated before the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphaccel
from graphaccel.checkpoint.staging import Staging
from graphaccel.compat.torch.fakes import FakeTensorMode
from tests.checkpoint.test_save_load import build, train


def allocate(*_: Any, **__: Any) -> None:
    raise AssertionError


def test_the_first_save_allocates_nothing_where_every_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build()
    kinds = {"every": 3, "asynchronous": True, "scheduler": run[2]}
    assert graphaccel.save(tmp_path, *run[:2], step=1, **kinds) is None  # no optimizer state yet
    train(run, 1)
    assert graphaccel.save(tmp_path, *run[:2], step=2, **kinds) is None
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", allocate)
        saved = graphaccel.save(tmp_path, *run[:2], step=3, **kinds)
    assert saved is not None
    expected = train(run, 2)
    saved.wait()
    other = build(seed=1)
    assert graphaccel.load(tmp_path, *other[:2], scheduler=other[2]).step == 3
    assert train(other, 2) == expected


@pytest.mark.parametrize("resumed", [False, True])
def test_the_first_save_allocates_nothing_where_load_announced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    run = build()
    if resumed:
        train(run, 1)
        graphaccel.save(tmp_path, *run[:2], step=1, scheduler=run[2])
        run = build(seed=2)
    graphaccel.load(tmp_path, *run[:2], scheduler=run[2], asynchronous=True)
    for _ in range(2):
        train(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", allocate)
        saved = graphaccel.save(tmp_path, *run[:2], step=3, scheduler=run[2], asynchronous=True)
    assert saved is not None
    expected = train(run, 2)
    saved.wait()
    other = build(seed=1)
    assert graphaccel.load(tmp_path, *other[:2], scheduler=other[2]).step == 3
    assert train(other, 2) == expected


def test_a_first_save_that_nothing_announced_allocates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build()
    train(run, 1)
    monkeypatch.setattr(torch, "empty", allocate)
    with pytest.raises(AssertionError):
        graphaccel.save(tmp_path, *run[:2], step=3, asynchronous=True)


class Calls(TorchDispatchMode):
    """Notes each operator's name and keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append((func.__name__.split(".")[0], {**(kwargs or {}), "args": args[2:]}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_beside_a_gpu_the_memory_is_pinned_and_the_copies_do_not_wait(device: str) -> None:
    """By tensors without memory: a machine without a GPU can not pin."""
    staging, calls = Staging(), Calls()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weight = torch.empty(3, 4, device=device)
        for _ in range(2):  # the second one into the memory of the first
            with calls:
                built = staging.copy({"weight": weight})
        assert (built["weight"].device.type, built["weight"].shape) == ("cpu", (3, 4))
    on_gpu = device == "cuda"
    pinned = [named["pin_memory"] for name, named in calls.seen if name == "empty"]
    assert pinned == [on_gpu]
    waits = [named["args"] for name, named in calls.seen if name == "copy_"]
    assert waits == ([(True,), (True,)] if on_gpu else [])  # those of a host are other threads'
