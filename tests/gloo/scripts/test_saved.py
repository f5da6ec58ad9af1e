"""Saving an optimized model by other libraries: the plain model comes back, or GA411."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import graphaccel
from graphaccel.errors import PartOfModel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS = plans_of_two("zero3", "tensor", "pipeline")


def _gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=32, **drops)
    return GPT2LMHeadModel(config)


@captures_of("saved")
def _trained(model: nn.Module, **pins: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    graphaccel.optimize(model, optimizer, **pins)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def test_one_process_pickles_the_plain_model() -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    batch = small_batch()
    assert inspect.getfullargspec(model.forward) == inspect.getfullargspec(Classifier().forward)
    model(*batch).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        torch.load(file, weights_only=False),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        copy.copy(model),
    ):
        assert type(other) is Classifier
        assert not hasattr(other, "graphaccel")
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
        assert torch.allclose(other(*batch), model(*batch))
    assert copy.deepcopy(model).out.weight is not model.out.weight


class Linked(Classifier):
    """A model that knows itself from inside, and drops something when it is pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.owner = [self]
        self.lock: Any = iter(())

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "lock"}


def test_a_copy_keeps_references_and_what_the_class_says_of_its_state() -> None:
    model = graphaccel.optimize(Linked(), devices=1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.inner.owner[0] is other
        assert not hasattr(other, "lock")
    assert hasattr(model, "lock")


def test_what_libraries_read_of_a_model_stays() -> None:
    plain, model = _gpt2(), _trained(_gpt2(), devices=1)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.forward.__doc__ == plain.forward.__doc__
    assert isinstance(model, GPT2LMHeadModel)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.__class__.__mro__[1:] == GPT2LMHeadModel.__mro__
    assert model.config.to_dict() == {**plain.config.to_dict()}
    assert model.get_input_embeddings() is model.transformer.wte


def _refusals(kind: str, folder: str) -> dict[str, str]:
    model = _trained(_gpt2(), **PLANS[kind])
    rank = dist.get_rank()

    def state_in(write: Callable[[dict[str, Tensor], str], Any]) -> None:
        write(dict(model.state_dict()), f"{folder}/state-{rank}")

    attempts: dict[str, Callable[[], Any]] = {
        "pickle": lambda: pickle.dumps(model),
        "torch.save(model)": lambda: torch.save(model, io.BytesIO()),
        "torch.save(state)": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "parameters": lambda: torch.save(list(model.parameters()), io.BytesIO()),
        "save_model": lambda: safetensors.torch.save_model(model, f"{folder}/model-{rank}"),
        "save_file": lambda: state_in(safetensors.torch.save_file),
        "save_pretrained": lambda: model.save_pretrained(f"{folder}/hf-{rank}"),
        "inside": lambda: torch.save(model.transformer.state_dict(), io.BytesIO()),
        "inside, in safetensors": lambda: safetensors.torch.save_model(
            model.transformer, f"{folder}/inside-{rank}"
        ),
        "copied": lambda: torch.save(copy.deepcopy(model.state_dict()), io.BytesIO()),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "written"
        except Exception as error:
            said[name] = type(error).__name__
    state = graphaccel.full_state_dict(model)  # the lines of the help
    if rank == 0:
        torch.save(state, f"{folder}/model.pt")
        safetensors.torch.save_file(state, f"{folder}/model.safetensors")
        model.save_pretrained(f"{folder}/hf", state_dict=state)
    graphaccel.export(f"{folder}/exported", model, max_shard_bytes=8000)
    for parameter in model.parameters():
        parameter.data.zero_()
    graphaccel.load(f"{folder}/exported", model)
    again = graphaccel.full_state_dict(model)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    return said


@pytest.mark.parametrize("kind", PLANS)
def test_parts_are_refused_and_the_lines_to_type_work(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    for said in pool.run(2, _refusals, kind, str(tmp_path)):
        assert set(said.values()) == {PartOfModel.__name__}, said
    assert not list(tmp_path.glob("**/*-[01].*"))
    expected = _trained(_gpt2(), devices=1).state_dict()
    read = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").state_dict()
    exported = GPT2LMHeadModel.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in read.items())
    for state in (
        torch.load(tmp_path / "model.pt"),
        safetensors.torch.load_file(tmp_path / "model.safetensors"),
        read,
    ):
        assert set(state) == set(expected)
        for name, value in expected.items():
            assert torch.allclose(state[name], value, atol=1e-5), name
