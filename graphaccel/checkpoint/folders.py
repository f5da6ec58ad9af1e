"""Folders of checkpoints: which are complete, which is the newest, which can be removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphaccel.checkpoint.lock import FolderLock
from graphaccel.checkpoint.manifest import NAME, Manifest, read_manifest
from graphaccel.errors import CheckpointDamaged, GraphMisuse
from graphaccel.progress import progress

_STEP = re.compile(r"step-[0-9]{8,}(\.[0-9]+)?")
LATEST = "latest"
"""The name of the link to the newest complete checkpoint."""


@dataclass(frozen=True)
class CompleteCheckpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


def complete(root: Path) -> list[CompleteCheckpoint]:
    """The complete checkpoints of a folder, the newest last. One whose manifest cannot be read is
    left out: `newest` raises for it."""
    results = []
    for folder in _folders(root):
        if _has_manifest(folder):
            try:
                results.append(CompleteCheckpoint(folder, read_manifest(folder)))
            except CheckpointDamaged:
                continue
    return sorted(results, key=lambda f: f.manifest.number)


def newest(root: Path) -> CompleteCheckpoint | None:
    """The newest complete checkpoint of a folder, None where there is none.

    Raises CheckpointDamaged (GA413) where a manifest cannot be read: it may be the newest.
    """
    result = complete(root)
    known = {f.folder for f in result}
    for folder in _folders(root):
        if _has_manifest(folder) and folder not in known:
            try:
                read_manifest(folder)
            except CheckpointDamaged as error:
                before = str(result[-1].folder) if result else ""
                raise CheckpointDamaged(
                    path=error.path, problems=error.problems, before=before
                ) from None
    return result[-1] if result else None


def is_step(path: Path) -> bool:
    """Whether a path has the name of one checkpoint, or is the link to the newest."""
    return _STEP.fullmatch(path.name) is not None or (path.name == LATEST and path.is_symlink())


def is_there(path: Path) -> bool:
    """Whether a path leads to something. Raises OSError where it can lead to nothing: through a
    file, or by a link whose target is missing."""
    try:
        path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise
        return False
    return True


def has_checkpoints(root: Path) -> bool:
    """Whether a folder has checkpoints, complete ones alone."""
    return any(_has_manifest(folder) for folder in _folders(root))


def open_step(root: Path, step: int, lock: FolderLock) -> tuple[Path, int]:
    """Create the folder of a new checkpoint, held by `lock`; returns it and its number.

    Removes what saves left behind that did not complete, but not what another process writes now.
    A complete checkpoint of the same step is never written over: the new one gets a name of its
    own. Raises GraphMisuse (GA407) where `root` is itself a checkpoint.
    """
    if (root / NAME).is_file():
        raise GraphMisuse(
            what=f"`{root}` is one checkpoint, and not the folder of all of them",
            help_line=f"graphaccel.save({str(root.parent)!r}, model, optimizer, step={step})",
        )
    root.mkdir(parents=True, exist_ok=True)
    for folder in _folders(root):
        if not _has_manifest(folder):
            _remove(folder)
    result = complete(root)
    name, attempt = f"step-{step:08d}", 2
    folder = root / name
    while not _created(folder, lock):
        folder = root / f"{name}.{attempt}"
        attempt += 1
    return folder, (result[-1].manifest.number if result else 0) + 1


def link_latest(root: Path, folder: Path) -> None:
    """Make `latest` a link to a complete checkpoint, for what reads the folder from outside. Where
    that is not possible a line says so: `load` does not need it."""
    new = root / f".{LATEST}.part"
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(root / LATEST)
    except OSError as error:
        progress("no link", f"{root / LATEST}: {error.strerror or error}", 0.0)


def keep_last(root: Path, count: int | None) -> None:
    """Remove all but the newest `count` complete checkpoints; None keeps all.

    One that cannot be removed is named in a line: the new checkpoint is complete all the same.
    """
    if count is None:
        return
    for result in complete(root)[:-count]:
        _remove(result.folder)


def _created(folder: Path, lock: FolderLock) -> bool:
    """Create a folder and hold it; False if it is there already or another process took it."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return lock.take(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, or what is left of one; name it in a line where that is not possible.
    Of a link only the link is removed, as what it leads to may serve others."""
    lock = FolderLock()
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        complete = (folder / NAME).exists()
        if not lock.take(folder):
            progress("kept", f"{folder}, which another process writes or removes", 0.0)
            return
        if complete:
            (folder / NAME).unlink()  # first: half removed, it must not look complete
        elif (folder / NAME).exists():
            return  # another process has completed it meanwhile
        shutil.rmtree(folder)
    except OSError as error:
        progress("kept", f"{folder}, which can not be removed: {error.strerror or error}", 0.0)
    finally:
        lock.release()


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest; True where that can not be read: it may be the newest."""
    try:
        return is_there(folder / NAME)
    except OSError:
        return True


def _folders(root: Path) -> Iterator[Path]:
    if os.path.isdir(root):  # Path.is_dir raises where the system refuses an answer
        yield from sorted(p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())
