"""Folders of checkpoints that others share, link, fill or forbid: nothing complete is lost, and
what is no checkpoint is never taken for an empty start."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import graphaccel
from graphaccel import errors
from tests.checkpoint.test_save_load import steps


def _model(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def _holds(folder: Path, value: float) -> bool:
    """Whether a checkpoint has weights of this value."""
    model = _model(-1.0)
    graphaccel.load(folder, model)
    return bool((model.weight == value).all())


def test_an_older_one_that_can_not_be_removed_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(39, "Directory not empty")

    graphaccel.save(tmp_path, _model(1.0), step=1)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    for step in (2, 3):  # the second time, what is left of the first
        graphaccel.save(tmp_path, _model(step), step=step, keep=1)
        assert _holds(tmp_path, step)
    assert "kept" in (text := capsys.readouterr().err)
    assert f"{tmp_path}/step-00000001, which can not be removed: Directory not empty" in text
    monkeypatch.undo()
    graphaccel.save(tmp_path, _model(4.0), step=4, keep=1)
    assert steps(tmp_path) == ["step-00000004"]


def test_of_a_link_the_link_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "run", tmp_path / "other disk"
    graphaccel.save(root, _model(1.0), step=1)
    elsewhere.mkdir()
    shutil.move(root / "step-00000001", elsewhere)
    (root / "step-00000001").symlink_to(elsewhere / "step-00000001")
    assert _holds(root, 1.0)
    graphaccel.save(root, _model(2.0), step=2, keep=1)
    assert steps(root) == ["step-00000002"]
    assert _holds(elsewhere / "step-00000001", 1.0)


def test_latest_follows_the_newest_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        graphaccel.save(tmp_path, _model(step), step=step, keep=1)
        assert os.readlink(tmp_path / "latest") == f"step-{step:08d}"
        assert _holds(tmp_path / "latest", step)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", refuse)
    with pytest.raises(errors.CheckpointNotSaved):
        graphaccel.save(tmp_path, _model(4.0), step=4)
    assert _holds(tmp_path / "latest", 3.0)
    monkeypatch.undo()
    monkeypatch.setattr(Path, "symlink_to", refuse)  # a file system without links
    capsys.readouterr()
    graphaccel.save(tmp_path, _model(5.0), step=5)
    assert f"{tmp_path}/latest: No space left on device" in capsys.readouterr().err
    assert _holds(tmp_path, 5.0)


def test_two_runs_that_save_at_once_are_both_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is held in its write while the second opens the same step, and completes."""
    write, inside, go = FileSystemWriter.write_data, threading.Event(), threading.Event()

    def in_turn(*arguments: Any) -> Any:
        if not inside.is_set():
            inside.set()
            assert go.wait(30)
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", in_turn)
    first = graphaccel.save(tmp_path, _model(1.0), step=1, asynchronous=True)
    assert inside.wait(30)
    second = graphaccel.save(tmp_path, _model(2.0), step=1, keep=1)
    go.set()
    assert first is not None
    assert second is not None
    first.wait()
    assert first.folder != second.folder
    for saved, value in ((first, 1.0), (second, 2.0)):
        assert _holds(saved.folder, value)
        assert not (saved.folder / "writing.lock").exists()


def test_what_is_named_and_not_there_is_no_start_at_step_0(tmp_path: Path) -> None:
    run = tmp_path / "run"
    graphaccel.save(run, _model(1.0), step=1)
    (run / "step-00000002").mkdir()
    plain = tmp_path / "plain"
    dcp.save(_model().state_dict(), checkpoint_id=str(plain), no_dist=True)
    before = f"graphaccel.load('{run}/step-00000001', model, optimizer)"
    for folder, problem, help_line in (
        (run / "step-00000003", "there is no such checkpoint", before),
        (run / "step-00000002", "it is not complete: it has no manifest.json", before),
        (plain, "it is not complete: it has no manifest.json", "copy it again"),
    ):
        with pytest.raises(errors.CheckpointDamaged) as raised:
            graphaccel.load(folder, _model())
        assert problem in str(raised.value)
        assert help_line in str(raised.value)


def test_a_checkpoint_is_not_the_folder_of_all_of_them(tmp_path: Path) -> None:
    saved = graphaccel.save(tmp_path, _model(1.0), step=1)
    assert saved is not None
    with pytest.raises(errors.GraphMisuse) as raised:
        graphaccel.save(saved.folder, _model(2.0), step=2)
    assert f"graphaccel.save({str(tmp_path)!r}, model, optimizer, step=2)" in str(raised.value)
    assert _holds(tmp_path, 1.0)


def test_exported_weights_do_not_hide_the_checkpoints_beside_them(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    graphaccel.export(tmp_path, _model(1.0))
    assert _holds(tmp_path, 1.0)
    graphaccel.save(tmp_path, _model(2.0), step=5)
    assert graphaccel.load(tmp_path, _model()).step == 5
    assert _holds(tmp_path / "model.safetensors", 1.0)


ODD = [
    (lambda f: f / ("a" * 300), "File name too long"),
    (lambda f: f / "a\0b", "embedded null byte"),
    (lambda f: f / "file" / "inside", "Not a directory"),
    (lambda f: f / "to nothing", "File exists|No such file"),
    (lambda f: f / "to itself", "File exists|Too many levels"),
]


@pytest.mark.parametrize(("place", "cause"), ODD)
def test_places_that_lead_nowhere(tmp_path: Path, place: Any, cause: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "to nothing").symlink_to(tmp_path / "nothing")
    (tmp_path / "to itself").symlink_to(tmp_path / "to itself")
    with pytest.raises(errors.CheckpointNotSaved, match=cause):
        graphaccel.save(place(tmp_path), _model(), step=1)
    with pytest.raises(errors.CheckpointDamaged, match=cause):
        graphaccel.load(place(tmp_path), _model())


@pytest.mark.parametrize("name", ["with spaces", "größe 日本", "a\nb", os.fsdecode(b"\xff\xfe")])
def test_names_that_are_unusual(tmp_path: Path, name: str) -> None:
    graphaccel.save(tmp_path / name, _model(3.0), step=1, scale=torch.ones(1))
    assert _holds(tmp_path / name, 3.0)
