"""Checks that what a run of `graphaccel train` writes has a place, before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from graphaccel.errors import BadTraining

_ELSEWHERE = "--output trained"


def check_places(output: Path, metrics: Path | None, *, tensorboard: bool) -> None:
    """Raises BadTraining (GA418) where a folder or file can not be written."""
    folders = [("output", output), *([("tensorboard", output / "runs")] * tensorboard)]
    for name, folder in folders:
        if (reason := _not_within(folder)) is not None:
            raise BadTraining(what=f"`{name}` can not be written: {reason}", help_line=_ELSEWHERE)
    if metrics is None:
        return
    reason = "it is a folder" if metrics.is_dir() else _not_within(metrics.parent)
    if reason is None and metrics.exists() and not os.access(metrics, os.W_OK):
        reason = "the file is not yours to write"
    if reason is not None:
        what = f"`metrics` `{metrics}` can not be written: {reason}"
        raise BadTraining(what=what, help_line="--metrics metrics.jsonl")


def _not_within(folder: Path) -> str | None:
    """Why a folder, which need not be there yet, can not be written into; None where it can."""
    there = next(each for each in (folder, *folder.parents) if each.exists() or each == each.parent)
    if not there.is_dir():
        return f"`{there}` is no folder"
    return None if os.access(there, os.W_OK) else f"`{there}` is not yours to write"
