"""Checkpoints that are damaged, of another model, or harmful: refused, with nothing run."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphaccel
from graphaccel import errors
from tests.checkpoint.test_save_load import Run, build, steps, train

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    folder, run = tmp_path_factory.mktemp("saved"), build()
    for step in (1, 2):
        train(run, 1)
        graphaccel.save(folder, *run[:2], step=step)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@contextmanager
def refused(kind: type[errors.GraphAccelError], run: Run) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The error is raised, and the model and optimizer are as they were."""
    model, optimizer, _ = run
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(kind) as raised:
        yield raised
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _other_random(folder: Path, **states: Any) -> None:
    """Random states that no generator has, as in a file without a checksum."""
    path = folder / "random-00000.pt"
    torch.save({**torch.load(path, weights_only=True), **states}, path)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files[path.name] = path.stat().st_size
    _edit(folder / "manifest.json", files=files, checksums={})


DAMAGES: list[tuple[Damage, str]] = [
    (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    (lambda f: _cut(f / "__0_0.distcp"), "__0_0.distcp has "),
    (lambda f: (f / "state.pt").unlink(), "state.pt is missing"),
    (lambda f: _cut(f / ".metadata"), ".metadata has "),
    (lambda f: (f / "manifest.json").write_text("{"), "Expecting property name"),
    (lambda f: (f / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
    (lambda f: (f / "manifest.json").write_text("3"), "it is no JSON object"),
    (lambda f: _edit(f / "manifest.json", format=9), "format is 9, and 1 is read here"),
    (lambda f: _edit(f / "manifest.json", step="2"), "step is '2', and must be a whole number"),
    (lambda f: _edit(f / "manifest.json", files={"../x": 1}), "'../x' is no file of this folder"),
    (lambda f: _edit(f / "manifest.json", files={}), "manifest.json does not name state.pt"),
    (lambda f: _other_random(f, python=(3, [-1] * 625, None)), "random-00000.pt does not hold"),
    (lambda f: _other_random(f, torch=torch.zeros(3)), "random-00000.pt does not hold"),
    (lambda f: _edit(f / "manifest.json", tensors={}), "lists other tensors than .metadata"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES)
def test_damaged(folder: Path, damage: Damage, problem: str) -> None:
    damage(folder / "step-00000002")
    run = build(seed=4)
    with refused(errors.CheckpointDamaged, run) as raised:
        graphaccel.load(folder, *run[:2])
    assert problem in raised.value.problems[0]
    assert raised.value.before == str(folder / "step-00000001")
    assert graphaccel.load(raised.value.before, *run[:2]).step == 1  # what the help says


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.pt", "random-00000.pt"])
def test_no_changed_byte_is_loaded(folder: Path, name: str) -> None:
    """Numbers among them: a loaded weight is the one that was saved."""
    path = folder / "step-00000002" / name
    content = path.read_bytes()
    run = build()
    graphaccel.load(folder, *run[:2])
    expected = {key: value.clone() for key, value in run[0].state_dict().items()}
    refusals: list[Any] = []
    for place in range(7, len(content), max(1, len(content) // 60)):
        changed = bytearray(content)
        changed[place] ^= 90
        path.write_bytes(changed)
        other = build(seed=1)
        try:
            graphaccel.load(folder, *other[:2])
        except (errors.CheckpointDamaged, errors.CheckpointUntrusted) as error:
            refusals.append(error)
        else:  # a byte between the parts, which nothing reads
            for key, value in other[0].state_dict().items():
                assert torch.equal(value, expected[key])
            for p, q in zip(run[1].state.values(), other[1].state.values(), strict=True):
                assert all(torch.equal(p[key], q[key]) for key in p)
    sums = [error for error in refusals if "other bytes" in str(error)]
    assert len(refusals) > 20
    assert {error.before for error in sums} == {str(folder / "step-00000001")}


def test_checksums_do_not_follow_the_scripts_own_setting(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(not before)
    try:
        graphaccel.save(tmp_path, model, optimizer, step=1)
        assert torch.serialization.get_crc32_options() is not before
    finally:
        torch.serialization.set_crc32_options(before)
    assert graphaccel.load(tmp_path, model, optimizer).step == 1


def test_another_model_is_listed_by_name_and_shape(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 6), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(errors.CheckpointDiffers, (model, optimizer, None)) as raised:  # type: ignore
        graphaccel.load(folder, model, optimizer)
    assert (
        str(raised.value)
        == f"""\
error[GA414]: `{folder}/step-00000002` does not fit this model or optimizer
  only in the checkpoint:
    model.2.running_mean float32[8]
    model.2.running_var float32[8]
    model.2.num_batches_tracked int64[]
  different in the checkpoint:
    model.2.weight float32[8], here float32[6, 8]
    model.2.bias float32[8], here float32[6]
    model.3.weight float32[4, 8], here float32[5, 8]
    model.3.bias float32[4], here float32[5]
    optimizer has 2 parameter groups, here 1
  why:  a part of it would silently keep the values that it has now
  help: build the model and the optimizer as they were when it was saved; its manifest.json lists every tensor
  explain: graphaccel explain GA414"""
    )


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_another_optimizer(folder: Path, name: str) -> None:
    model, optimizer, scheduler = build()
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    other = getattr(torch.optim, name)(groups, lr=0.1)
    with refused(errors.CheckpointDiffers, (model, other, scheduler)) as raised:
        graphaccel.load(folder, model, other)
    assert raised.value.changed == (f"optimizer: AdamW, here {name}",)
    assert other.param_groups[0]["lr"] == 0.1


def test_another_scheduler(tmp_path: Path) -> None:
    run, other = build(), build()
    graphaccel.save(tmp_path, *run[:2], step=1, scheduler=run[2])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other[1], 0.5)
    with refused(errors.CheckpointDiffers, other) as raised:
        graphaccel.load(tmp_path, *other[:2], scheduler=scheduler)
    assert raised.value.changed == ("scheduler: CosineAnnealingLR, here ExponentialLR",)


class _Raises:
    """An object of a script's whose state can not be taken, or not be given."""

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        self.given = given

    def state_dict(self) -> dict[str, Any]:
        if self.given is None:
            raise KeyError("place")
        return self.given

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise TypeError(f"no {state['place']}")


def test_objects_that_raise(tmp_path: Path) -> None:
    run = build()
    for given, said in (
        (None, r"`data.state_dict\(\)` raised KeyError: 'place'"),
        ({"place": lambda: 0}, r"`data` is saved with more than .* \['place'\] is a"),
    ):
        with pytest.raises(errors.GraphMisuse, match=said):
            graphaccel.save(tmp_path, *run[:2], step=1, data=_Raises(given))
    graphaccel.save(tmp_path, *run[:2], step=1, data=_Raises({"place": 7}))
    other = build(seed=1)
    with refused(errors.CheckpointDiffers, other) as raised:
        graphaccel.load(tmp_path, *other[:2], data=_Raises())
    assert raised.value.changed == ("data: TypeError: no 7",)


def test_an_object_that_was_not_saved(folder: Path) -> None:
    run = build()
    with refused(errors.CheckpointDiffers, run) as raised:
        graphaccel.load(folder, *run[:2], scheduler=run[2])
    assert raised.value.missing == ("scheduler",)


# --- pickles --------------------------------------------------------------------------------------


class _Harm:
    """Unpickled, it creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _harmful(path: Path, mark: Path) -> None:
    if path.name == ".metadata":
        path.write_bytes(pickle.dumps({"weight": _Harm(mark)}))
    else:
        torch.save({"weight": torch.zeros(2), "more": _Harm(mark)}, path)


@pytest.mark.parametrize("name", [".metadata", "state.pt", "random-00000.pt"])
def test_no_pickle_of_a_checkpoint_is_run(folder: Path, tmp_path: Path, name: str) -> None:
    step, mark = folder / "step-00000002", tmp_path / "harm"
    _harmful(step / name, mark)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"][name] = (step / name).stat().st_size
    (step / "manifest.json").write_text(json.dumps(manifest))
    run = build(seed=4)
    with refused(errors.CheckpointUntrusted, run) as raised:
        graphaccel.load(folder, *run[:2])
    assert raised.value.named == "posix.mkdir"
    assert not mark.exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_no_pickle_of_weights_is_run(tmp_path: Path, legacy: bool) -> None:
    path, mark = tmp_path / "weights.pt", tmp_path / "harm"
    if legacy:
        path.write_bytes(pickle.dumps({"weight": _Harm(mark)}))
    else:
        _harmful(path, mark)
    run = build()
    with refused((errors.CheckpointUntrusted, errors.CheckpointDamaged), run):  # type: ignore
        graphaccel.load(path, run[0])
    assert not mark.exists()


# --- folders that cannot be written ---------------------------------------------------------------


@contextmanager
def _no_file_over(size: int) -> Iterator[None]:
    """Meanwhile writes beyond this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 2000, 5000, 10_000])
def test_a_disk_that_is_full(folder: Path, size: int) -> None:
    run = build()
    train(run, 1)
    with _no_file_over(size), pytest.raises(errors.CheckpointNotSaved, match="File too large"):
        graphaccel.save(folder, *run[:2], step=3)
    assert steps(folder) == ["step-00000001", "step-00000002"]
    assert graphaccel.load(folder, *run[:2]).step == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = build()
    for bad in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(errors.CheckpointNotSaved, match=r"File exists|Not a directory"):
            graphaccel.save(bad, *run[:2], step=1)
    with pytest.raises(errors.CheckpointDamaged, match="it is not a folder of checkpoints"):
        graphaccel.load(tmp_path / "file", run[0])


# --- any change to a manifest or to metadata ------------------------------------------------------


def _mutated(text: bytes, seed: int) -> bytes:
    """One random change: bytes replaced, cut out or repeated, or a JSON value replaced."""
    draw = random.Random(seed)
    start = draw.randrange(len(text))
    end = min(len(text), start + draw.choice((1, 1, 4, 40)))
    middle = draw.choice(
        (b"", b"-1", b"1e9", b"null", b"[[]]", b'"x"', b"\xff\x00", text[start:end] * 3)
    )
    return text[:start] + middle + text[end:]


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_every_mutation_is_refused_or_loads_the_same(folder: Path, name: str) -> None:
    step = folder / "step-00000002"
    whole = (step / name).read_bytes()
    codes = []
    run = build()
    for seed in range(300):
        (step / name).write_bytes(_mutated(whole, seed))
        if name != "manifest.json":  # of the right size, or its size alone refuses it
            manifest = json.loads((step / "manifest.json").read_text())
            manifest["files"][name] = (step / name).stat().st_size
            manifest["checksums"] = {}
            (step / "manifest.json").write_text(json.dumps(manifest))
        try:
            graphaccel.load(step, *run[:2])
        except errors.GraphAccelError as error:
            codes.append(error.code)
    assert len(codes) > 200
    assert {"GA413"} <= set(codes) <= {"GA413", "GA414", "GA415"}


class Quantized(torch.Tensor):
    """A tensor that is made of codes and a scale, as torchao's 8-bit state is."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return args[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_quantized_tensor_adds_is_not_lost(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer, _ = build()
    weight = model[0].weight
    optimizer.state[weight] = {"exp_avg": Quantized(weight)}
    with pytest.raises(errors.GraphMisuse) as caught:
        graphaccel.save(tmp_path, model, optimizer, step=1, asynchronous=asynchronous)
    sentence = f"`optimizer.state.0.weight.exp_avg` is a {__name__}.Quantized, which a checkpoint"
    assert sentence in str(caught.value)
    assert "save the model alone:  graphaccel.save(folder, model, step=step)" in str(caught.value)
    saved = graphaccel.save(tmp_path, model, step=1, asynchronous=asynchronous)
    assert saved is not None
    saved.wait()
    assert graphaccel.load(tmp_path, model).step == 1
