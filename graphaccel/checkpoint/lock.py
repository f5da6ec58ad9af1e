"""Holds the folder of a checkpoint while it is written, so that no other run removes it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

NAME = "writing.lock"


class FolderLock:
    """A lock of the operating system on a file in the folder: it ends with the process that holds
    it. Where the file system has none, a folder counts as held by nobody else."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def take(self, folder: Path) -> bool:
        """Whether the folder is now held by this lock: False if another one holds it, or if it is
        gone."""
        path = folder / NAME
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            return False
        held = _locked(descriptor)
        if held and _same_file(descriptor, path):
            self._path, self._descriptor = path, descriptor
            return True
        os.close(descriptor)
        return False

    def release(self) -> None:
        """Remove the file and end the lock; does nothing if it holds no folder."""
        if self._path is None:
            return
        if _same_file(self._descriptor, self._path):
            with suppress(OSError):
                self._path.unlink()
        os.close(self._descriptor)
        self._path = None


def _locked(descriptor: int) -> bool:
    """Lock a file; False if another process has."""
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file: another process may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
