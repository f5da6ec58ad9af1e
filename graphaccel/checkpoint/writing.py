"""Writes one checkpoint: tensors by torch.distributed.checkpoint, the manifest last."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.serialization.config  # torch.save imports it when it is first called
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from graphaccel.checkpoint.folders import complete, keep_last, link_latest, open_step
from graphaccel.checkpoint.lock import NAME as LOCK
from graphaccel.checkpoint.lock import FolderLock
from graphaccel.checkpoint.manifest import Manifest, checksum
from graphaccel.checkpoint.together import Together
from graphaccel.compat.torch.checkpoint import save_tensors
from graphaccel.errors import CheckpointNotSaved

STATE = "state.pt"
"""Settings and plain values, from rank 0."""


def random_file(rank: int) -> str:
    """The file with the random states of a rank."""
    return f"random-{rank:05d}.pt"


class _Writer(FileSystemWriter):
    """DCP's writer of a folder, which says what the operating system reported: where a write fails,
    torch's own writer of a file then raises a RuntimeError about positions in it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise error if cause is None else cause from None


@dataclass(frozen=True)
class Job:
    """A checkpoint to write, with everything that belongs to it already copied.

    root: the folder of all checkpoints. state, random: files of `torch.save`, as bytes. plan: as
    JSON. keep: how many complete checkpoints stay. lock: of rank 0, on the folder that is written.
    """

    together: Together
    root: Path
    step: int
    tensors: Mapping[str, Tensor]
    state: bytes
    random: bytes
    plan: Any
    keep: int | None
    lock: FolderLock = field(default_factory=FolderLock)

    def failed(self, rank: int, cause: str) -> CheckpointNotSaved:
        """The error for what a rank failed with."""
        try:
            result = complete(self.root)
        except OSError:  # what kept it from being written may keep the others from being read
            result = []
        return not_saved(self.root, self.step, rank, cause, result[-1].folder if result else None)

    def open(self) -> tuple[Path, int]:
        """Create its folder; returns it and the checkpoint's number. Collective."""
        return self.together.first(lambda: open_step(self.root, self.step, self.lock), self.failed)

    def write(self, folder: Path, number: int) -> None:
        """Write it into its folder, and remove older ones. Collective.

        Raises CheckpointNotSaved (GA412), RankLost (GA501).
        """
        try:
            metadata = self.together.collective(lambda: self._write_tensors(folder), self.failed)
            self.together.each(lambda: self._write_values(folder), self.failed)
            self.together.first(lambda: self._finish(folder, number, metadata), self.failed)
        except CheckpointNotSaved:
            if self.together.rank == 0:  # its room may be what is missing
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self.lock.release()

    def _write_tensors(self, folder: Path) -> Metadata:
        writer = _Writer(folder, sync_files=True, thread_count=1)
        return save_tensors(dict(self.tensors), writer, self.together.group)

    def _write_values(self, folder: Path) -> None:
        rank = self.together.rank
        _write_file(folder / random_file(rank), self.random)
        if rank == 0:
            _write_file(folder / STATE, self.state)

    def _finish(self, folder: Path, number: int, metadata: Metadata) -> None:
        tensors = {
            name: (str(t.properties.dtype).removeprefix("torch."), tuple(t.size))
            for name, t in metadata.state_dict_metadata.items()
            if isinstance(t, TensorStorageMetadata)
        }
        paths = [path for path in sorted(folder.iterdir()) if path.name != LOCK]
        files = {path.name: path.stat().st_size for path in paths}
        written = {info.relative_path for info in metadata.storage_data.values()}
        random = {random_file(rank) for rank in range(self.together.ranks)}
        if missing := sorted((written | random) - set(files)):
            raise OSError(f"rank 0 does not see {missing[0]}: all ranks need the same folder")
        checksums = {name: checksum(folder / name) for name in files if name not in written}
        own = sys.modules["graphaccel"].__version__  # imported, it would import all of the package
        ranks, version = self.together.ranks, str(torch.__version__)
        Manifest(
            number, self.step, ranks, version, own, self.plan, tensors, files, checksums
        ).write(folder)  # fmt: skip
        link_latest(self.root, folder)
        keep_last(self.root, self.keep)


def not_saved(
    root: Path, step: int, rank: int, cause: str, newest: Path | None = None
) -> CheckpointNotSaved:
    """The error for the checkpoint of a step."""
    return CheckpointNotSaved(
        what=f"the checkpoint of step {step}",
        folder=str(root),
        rank=rank,
        cause=cause,
        call=f"graphaccel.save('checkpoints', model, optimizer, step={step})",
        newest="" if newest is None else str(newest),
    )


def as_file(value: Any) -> bytes:
    """The bytes that `torch.save` writes for a value."""
    built = io.BytesIO()
    torch.save(value, built)
    return built.getvalue()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
