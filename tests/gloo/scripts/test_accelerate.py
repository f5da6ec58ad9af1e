"""Accelerate around an optimized model: what it saves and loads, and the wrapper it prepares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphaccel
from graphaccel.errors import GraphAccelError
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two
from tests.support.small import Classifier, small_batch

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("zero3", "tensor", "pipeline")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def _trained(model: nn.Module, optimizer: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(*small_batch()).backward()
        optimizer.step()


def _difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(state) == set(other)
    return max(float((state[name] - other[name]).abs().max()) for name in state)


def test_one_process_saves_and_goes_on(tmp_path: Path) -> None:
    """`save_state` and `load_state` of a prepared model and optimizer, after `optimize`."""
    found = []
    for ours in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if ours:
            model, optimizer = graphaccel.optimize(model, optimizer, devices=1)
        model, optimizer = accelerator.prepare(model, optimizer)
        _trained(model, optimizer)
        accelerator.save_state(str(tmp_path / str(ours)))
        _trained(model, optimizer)
        accelerator.load_state(str(tmp_path / str(ours)))
        _trained(model, optimizer)
        accelerator.save_model(model, str(tmp_path / f"model-{ours}"))
        found.append(safetensors.torch.load_file(tmp_path / f"model-{ours}/model.safetensors"))
    assert _difference(*found) < 1e-6


@captures_of("accelerate")
def _copies(folder: str) -> float:
    """Where every process has the whole model: the difference of what was loaded."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = graphaccel.optimize(model, optimizer, data=2)
    _trained(model, optimizer)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    saved = graphaccel.full_state_dict(model)
    accelerator.save_state(folder)
    _trained(model, optimizer)
    accelerator.load_state(folder)
    return _difference(graphaccel.full_state_dict(model), saved)


def test_copies_are_saved_and_loaded(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _copies, str(tmp_path)) == [0.0, 0.0]


@captures_of("accelerate")
def _parts(kind: str, folder: str) -> tuple[dict[str, str], float]:
    """The code that each use of Accelerate is refused with; how far the weights are in the end from
    those of the file that the help's line reads."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = graphaccel.optimize(model, optimizer, **PLANS[kind])
    _trained(model, optimizer)
    before = graphaccel.full_state_dict(model)
    said = {}

    def attempt(name: str, use: Callable[[], Any]) -> None:
        try:
            use()
            said[name] = "done"
        except GraphAccelError as error:
            said[name] = error.code

    attempt("prepare", lambda: accelerator.prepare(model))
    accelerator.free_memory()
    accelerator.prepare_model(model, evaluation_mode=True)
    attempt("save_state", lambda: accelerator.save_state(f"{folder}/state-{dist.get_rank()}"))
    attempt("save_model", lambda: accelerator.save_model(model, f"{folder}/save-{dist.get_rank()}"))
    attempt("load_state", lambda: accelerator.load_state(f"{folder}/plain"))
    assert _difference(graphaccel.full_state_dict(model), before) == 0.0
    accelerator.save(graphaccel.full_state_dict(model), f"{folder}/whole.pt")
    accelerator.wait_for_everyone()
    assert _difference(torch.load(f"{folder}/whole.pt"), before) == 0.0
    state = safetensors.torch.load_file(f"{folder}/plain/model.safetensors")
    model.load_state_dict(state)
    return said, _difference(graphaccel.full_state_dict(model), state)


@pytest.mark.parametrize("kind", PLANS)
def test_parts_are_refused_and_the_lines_to_type_work(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(_model())
    accelerator.save_state(str(tmp_path / "plain"))
    for said, difference in pool.run(2, _parts, kind, str(tmp_path)):
        assert said == {
            "prepare": "GA410",
            "save_state": "GA411",
            "save_model": "GA411",
            "load_state": "GA411",
        }
        assert difference == 0.0
    assert not list(tmp_path.glob("**/model*-[01]*/model*"))
