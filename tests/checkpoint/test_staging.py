"""Host copies of an asynchronous save: their memory is allocated before the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphaccel
from tests.checkpoint.test_save_load import build, train


def test_the_first_save_allocates_nothing_where_every_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build()
    kinds = {"every": 3, "asynchronous": True, "scheduler": run[2]}
    assert graphaccel.save(tmp_path, *run[:2], step=1, **kinds) is None  # no optimizer state yet
    train(run, 1)
    assert graphaccel.save(tmp_path, *run[:2], step=2, **kinds) is None

    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", allocate)
        saved = graphaccel.save(tmp_path, *run[:2], step=3, **kinds)
    assert saved is not None
    expected = train(run, 2)
    saved.wait()
    other = build(seed=1)
    assert graphaccel.load(tmp_path, *other[:2], scheduler=other[2]).step == 3
    assert train(other, 2) == expected
