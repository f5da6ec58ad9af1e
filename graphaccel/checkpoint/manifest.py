"""The manifest of a checkpoint: what is in its folder. Written last, it makes it complete."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphaccel.errors import CheckpointDamaged

NAME = "manifest.json"
FORMAT = 1
_CAN_NOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
"""What file systems say that store names as they like, such as those over object stores."""


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    number: of the save in its folder of checkpoints, from 1: the newest has the highest. plan: as
    JSON, None without one. tensors: name → (dtype, shape), e.g. ("float32", (4, 8)). files: name →
    bytes. checksums: name → CRC-32 of a file without tensors of the model; older ones have none.
    """

    number: int
    step: int
    ranks: int
    torch: str
    graphaccel: str
    plan: Any
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    files: Mapping[str, int]
    checksums: Mapping[str, int] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it beside the files and rename it into place, both durably."""
        new = folder / f"{NAME}.new"
        with new.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / NAME)
        sync_folder(folder)
        sync_folder(folder.parent)

    @property
    def shapes(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Name → dtype and shape of every tensor."""
        result = self.tensors.items()
        return {name: (getattr(torch, kind), torch.Size(shape)) for name, (kind, shape) in result}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CAN_NOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, every field of it checked.

    Raises CheckpointDamaged (GA413).
    """
    path = folder / NAME
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return _checked(result)
    except RecursionError:
        problem = "it is nested too deeply"
    except (OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
    raise CheckpointDamaged(path=str(path), problems=(problem,))


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    return zlib.crc32(path.read_bytes())


def check_files(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """What is wrong with the files that a manifest names; empty where all have their size."""
    problems = []
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes, and was written with {size}")
    return tuple(problems)


def check_content(folder: Path, manifest: Manifest, names: Collection[str]) -> tuple[str, ...]:
    """Which of these files do not have the checksum that the manifest has of them."""
    return tuple(
        f"{name} holds other bytes than were written"
        for name in names
        if name in manifest.checksums and checksum(folder / name) != manifest.checksums[name]
    )


def _checked(result: Any) -> Manifest:
    """The manifest of parsed JSON. Raises ValueError."""
    if not isinstance(result, dict):
        raise ValueError("it is no JSON object")
    if result.get("format") != FORMAT:
        raise ValueError(f"format is {result.get('format')!r}, and {FORMAT} is read here")
    expected = set(Manifest.__dataclass_fields__) - {"plan", "checksums"}
    if missing := sorted(expected - set(result)):
        raise ValueError(f"{missing[0]} is missing")
    for name in ("torch", "graphaccel"):
        if not isinstance(result[name], str):
            raise ValueError(f"{name} is no text")
    tensors, files, sums = result["tensors"], result["files"], result.get("checksums", {})
    if not all(isinstance(each, dict) for each in (tensors, files, sums)):
        raise ValueError("tensors, files and checksums are objects")
    return Manifest(
        number=_count("number", result["number"]),
        step=_count("step", result["step"]),
        ranks=max(1, _count("ranks", result["ranks"])),
        torch=result["torch"],
        graphaccel=result["graphaccel"],
        plan=result.get("plan"),
        tensors={name: _tensor(name, value) for name, value in tensors.items()},
        files={_plain(name): _count(name, size) for name, size in files.items()},
        checksums={_plain(name): _count(name, number) for name, number in sums.items()},
    )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {str(value)[:40]!r}, and must be a whole number from 0")
    return value


def _plain(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no file of this folder")
    return name


def _tensor(name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise ValueError(f"tensor {name} is not given by a dtype and a shape")
    kind, shape = value
    if not isinstance(kind, str) or not isinstance(getattr(torch, kind, None), torch.dtype):
        raise ValueError(f"tensor {name} has the dtype {str(kind)[:40]!r}")
    return kind, tuple(_count(f"a size of {name}", size) for size in shape)
