"""Host copies of an asynchronous save: their memory is allocated before the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphaccel
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
