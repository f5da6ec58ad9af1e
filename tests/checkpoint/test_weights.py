"""Weights of others, and exported ones: state dicts, safetensors, Hugging Face folders."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import graphaccel
from graphaccel import errors
from tests.checkpoint.test_save_load import build


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """A tied GPT-2 of one layer."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=8))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with several files and an index."""
    path = tmp_path_factory.mktemp("hugging")
    gpt2(1).save_pretrained(path, max_shard_size="6KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_file(tmp_path: Path, name: str) -> None:
    model, other = build(0)[0], build(1)[0]
    path = tmp_path / name
    write = torch.save if name.endswith(".pt") else safetensors.torch.save_file
    write(model.state_dict(), path)
    loaded = graphaccel.load(path, other)
    assert (loaded.step, loaded.folder) == (0, path)
    assert same(model.state_dict(), other.state_dict())
    with pytest.raises(errors.CheckpointDamaged, match="there is no such file"):
        graphaccel.load(tmp_path / f"no-{name}", other)


def test_a_folder_of_several_files(folder: Path, tmp_path: Path) -> None:
    model = gpt2(2)
    graphaccel.load(folder, model)
    assert same(model.state_dict(), gpt2(1).state_dict())
    torch.manual_seed(4)
    body = GPT2Model(model.config)
    model.lm_head.weight = nn.Parameter(torch.zeros(50, 16))
    graphaccel.export(tmp_path / "untied", model)
    with pytest.raises(errors.CheckpointDiffers) as raised:  # the head is in the file only
        graphaccel.load(tmp_path / "untied", body)
    assert raised.value.unexpected == ("lm_head.weight float32[50, 16]",)
    assert "build the model that these weights are of" in str(raised.value)
    assert "manifest" not in str(raised.value)
    graphaccel.load(folder, body)  # tied: the names differ by the prefix of the body
    assert same(body.state_dict(), gpt2(1).transformer.state_dict())


@pytest.mark.parametrize("shard", [5 * 2**30, 6000])
def test_an_export_is_read_by_from_pretrained(tmp_path: Path, shard: int) -> None:
    model = gpt2(3)
    graphaccel.export(tmp_path, model, max_shard_bytes=6000 + shard % 7)
    graphaccel.export(tmp_path, model, max_shard_bytes=shard)  # over the other one
    assert (tmp_path / "model.safetensors").exists() == (shard > 6000)
    read = GPT2LMHeadModel.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(read.eval()(ids).logits, model.eval()(ids).logits)


def test_weights_beside_other_state(tmp_path: Path) -> None:
    model, optimizer, _ = build(0)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "run.pt")
    other = build(1)[0]
    graphaccel.load(tmp_path / "run.pt", other)
    assert same(model.state_dict(), other.state_dict())
    torch.save({**saved, "average": model.state_dict()}, tmp_path / "run.pt")  # which of the two?
    with pytest.raises(errors.CheckpointDiffers):
        graphaccel.load(tmp_path / "run.pt", other)


def test_a_whole_model_is_no_file_of_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(
        errors.CheckpointUntrusted, match=r"it names `torch.nn.modules.linear.Linear`"
    ):
        graphaccel.load(tmp_path / "model.pt", model)


@pytest.mark.parametrize("when", ["written", "renamed"])
def test_an_export_that_fails_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The second file can not be written, or not be renamed into place."""
    old, mine = gpt2(3), tmp_path / "model_ema.safetensors"
    graphaccel.export(tmp_path, old, max_shard_bytes=6000)
    mine.write_text("of the user")
    owner, name = (safetensors.torch, "save_file") if when == "written" else (Path, "replace")
    real, calls = getattr(owner, name), []

    def fail_second(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise (
                safetensors.SafetensorError("No space") if when == "written" else OSError(5, "I/O")
            )
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, fail_second)
    with pytest.raises(errors.CheckpointNotSaved, match=r"No space|I/O"):
        graphaccel.export(tmp_path, gpt2(4), max_shard_bytes=6000)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.new"))
    other = gpt2(5)
    if when == "written":
        graphaccel.load(tmp_path, other)
        assert same(other.state_dict(), old.state_dict())
    else:  # files of both are there, and no index that names them together
        with pytest.raises(
            errors.CheckpointDamaged, match=r"model.safetensors.index.json is missing"
        ):
            graphaccel.load(tmp_path, other)
        assert same(other.state_dict(), gpt2(5).state_dict())
    graphaccel.export(tmp_path, gpt2(4))
    assert mine.read_text() == "of the user"


def test_arguments_of_an_export(tmp_path: Path) -> None:
    for folder, size in ((None, 10), (tmp_path, 0), (tmp_path, "5GB")):
        with pytest.raises(errors.GraphMisuse, match=f"{folder if folder is None else repr(size)}"):
            graphaccel.export(folder, gpt2(), max_shard_bytes=size)  # pyright: ignore


def test_a_file_that_is_missing_or_cut_off(folder: Path, tmp_path: Path) -> None:
    for damage in ("missing", "cut off"):
        copy = Path(shutil.copytree(folder, tmp_path / damage))
        file = sorted(copy.glob("*.safetensors"))[1]
        content = file.read_bytes()
        file.unlink()
        if damage == "cut off":
            file.write_bytes(content[:-10])
        model = gpt2(5)
        with pytest.raises(errors.CheckpointDamaged):
            graphaccel.load(copy, model)
        assert same(model.state_dict(), gpt2(5).state_dict())


def test_every_mutation_of_an_index_is_refused_or_loads_the_same(
    folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    index = copy / "model.safetensors.index.json"
    whole, refused = index.read_text(), 0
    names = list(json.loads(whole)["weight_map"].values())
    model = gpt2(6)
    for seed in range(300):
        draw = random.Random(seed)
        at, new = draw.randrange(len(whole)), draw.choice(["", "null", "[", "../x", "3", names[0]])
        index.write_text(whole[:at] + new + whole[at + draw.randrange(60) :])
        try:
            graphaccel.load(copy, model)
            assert same(model.state_dict(), gpt2(1).state_dict())
        except (errors.CheckpointDamaged, errors.CheckpointDiffers):
            refused += 1
    assert refused > 180
