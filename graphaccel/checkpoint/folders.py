"""Folders of checkpoints: which are complete, which is the newest, which can be removed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphaccel.checkpoint.manifest import NAME, Manifest, read_manifest
from graphaccel.errors import CheckpointDamaged

_STEP = re.compile(r"step-[0-9]{8,}(\.[0-9]+)?")


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
        if (folder / NAME).exists():
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
        if (folder / NAME).exists() and folder not in known:
            try:
                read_manifest(folder)
            except CheckpointDamaged as error:
                before = str(result[-1].folder) if result else ""
                raise CheckpointDamaged(
                    path=error.path, problems=error.problems, before=before
                ) from None
    return result[-1] if result else None


def open_step(root: Path, step: int) -> tuple[Path, int]:
    """Create the folder of a new checkpoint; returns it and its number.

    Removes what saves left behind that did not complete. A complete checkpoint of the same step is
    never written over: the new one gets a name of its own.
    """
    root.mkdir(parents=True, exist_ok=True)
    for folder in _folders(root):
        if not (folder / NAME).exists():
            shutil.rmtree(folder)
    result = complete(root)
    name, attempt = f"step-{step:08d}", 2
    folder = root / name
    while folder.exists():
        folder = root / f"{name}.{attempt}"
        attempt += 1
    folder.mkdir()
    return folder, (result[-1].manifest.number if result else 0) + 1


def keep_last(root: Path, count: int | None) -> None:
    """Remove all but the newest `count` complete checkpoints; None keeps all."""
    if count is None:
        return
    for result in complete(root)[:-count]:
        (result.folder / NAME).unlink()  # first: half removed, it must not look complete
        shutil.rmtree(result.folder)


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from sorted(p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())
