"""Checkpoints in folders that this process may not read or write."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphaccel
from graphaccel import errors
from tests.checkpoint.test_save_load import build

_NOBODY = 65534


@contextmanager
def _no_superuser() -> Iterator[None]:
    own = os.geteuid()
    if own == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Checkpoints of steps 1 and 2, in a folder that everyone may read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for step in (1, 2):
            graphaccel.save(folder, *build()[:2], step=step)
        yield folder
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)


@pytest.mark.parametrize("what", ["", "manifest.json", "__0_0.distcp", "state.pt"])
def test_a_checkpoint_that_can_not_be_read(folder: Path, what: str) -> None:
    run, newest = build(), folder / "step-00000002"
    (newest / what).chmod(0)
    for path in (folder, newest):
        with _no_superuser(), pytest.raises(errors.CheckpointDamaged) as raised:
            graphaccel.load(path, *run[:2])
        text = str(raised.value)
        assert f"error[GA413]: `{newest}" in text
        assert "Permission denied" in text
        assert "no permission to read it" in text
        assert f"help: load the one before it:  graphaccel.load('{folder}/step-00000001'" in text
        assert graphaccel.load(raised.value.before, *run[:2]).step == 1


def test_a_folder_that_can_not_be_written(folder: Path) -> None:
    folder.chmod(0o555)
    with _no_superuser(), pytest.raises(errors.CheckpointNotSaved) as raised:
        graphaccel.save(folder, *build()[:2], step=3)
    text = str(raised.value)
    assert f"newest complete checkpoint: {folder}/step-00000002" in text
    assert "help: make the folder writable, or save it in one that is:  graphaccel.save(" in text
