"""A rank that is gone, at every collective of a run: an error of ours, not the backend's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import graphaccel
from graphaccel.errors import RankLost
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

NAMES = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_single", "broadcast",
    "broadcast_object_list", "gather_object", "scatter_object_list", "barrier",
)  # fmt: skip
SAID = "[pair.cc:1] Connection closed by peer [127.0.0.1]:1"
ROOT = str(Path(graphaccel.__file__).parent)


def _site(name: str) -> str:
    """The function of graphaccel that calls a collective, and those that call it."""
    frame, found = sys._getframe(2), [name]
    while frame is not None and len(found) < 5:
        code = frame.f_code
        if code.co_filename.startswith(ROOT):
            found.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    return " < ".join(found)


@contextmanager
def _watched(seen: list[str], failing: str) -> Iterator[None]:
    """Notes which collectives are called; the one at `failing` fails as where the peer is gone."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            site = _site(name)
            seen.append(site)
            if site == failing:
                raise RuntimeError(SAID)
            return call(*args, **kwargs)

        return collective

    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            if hasattr(dist, name):
                patch.setattr(dist, name, watched(name, getattr(dist, name)))
        yield


def _run(folder: str, optimizer: type[torch.optim.Optimizer], pins: dict[str, Any]) -> None:
    """What a script does with a model, on every rank alike."""
    torch.manual_seed(0)
    model, batch = Classifier(), small_batch()
    used = optimizer(model.parameters(), lr=0.1)
    example = None if "data" not in pins else batch
    graphaccel.optimize(model, used, devices=2, timeout=20.0, example_batch=example, **pins)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        scaler.scale(model(*batch)).backward()
        scaler.unscale_(used)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(used)
        scaler.update()
        used.zero_grad()
    with torch.no_grad():
        model.eval()(*batch)
    graphaccel.save(folder, model, used, step=1)
    graphaccel.load(folder, model.train(), used)
    graphaccel.full_state_dict(model)


@captures_of("lost in collectives")
def _each_lost(folder: str, *of_run: Any) -> dict[str, str]:
    """What the script ends with where the peer is gone at each of its collectives."""
    seen: list[str] = []
    with _watched(seen, ""):
        _run(folder, *of_run)
    ends = {}
    for failing in dict.fromkeys(seen):
        try:
            with _watched([], failing):
                _run(folder, *of_run)
            ends[failing] = "no error"
        except RankLost as error:
            ends[failing] = error.code
        except Exception as error:
            ends[failing] = f"{type(error).__name__}: {error}"
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "pins", "least"),
    [
        (torch.optim.AdamW, {"data": 2, "zero": 3, "clip_norm": 1.0}, 25),
        pytest.param(torch.optim.Adafactor, {"tensor": 2}, 20, marks=pytest.mark.release),
    ],
    ids=["zero 3", "tensor"],
)
def test_each_is_an_error_of_ours(
    pool: Pool, tmp_path: Path, optimizer: Any, pins: dict[str, Any], least: int
) -> None:
    for ends in pool.run(2, _each_lost, str(tmp_path), optimizer, pins, timeout_s=300.0):
        assert len(ends) >= least
        assert {site: end for site, end in ends.items() if end != "GA501"} == {}
