"""Reads pickles without running what they name: of torch.save, and DCP's metadata.

A pickle calls what it names while it is read. `torch.load(weights_only=True)` allows tensors and
plain values alone; torch.distributed.checkpoint reads its `.metadata` without such a limit, so it
is read here, and DCP is given the result.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from graphaccel.errors import CheckpointDamaged, CheckpointUntrusted

METADATA = ".metadata"
_NAMED = re.compile(r"(?:GLOBAL|global:?|[Ii]nstantiate|class) `?(\w+(?:\.\w+)+)")
"""What torch says that a pickle names."""
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the classes of DCP's metadata and torch's dtypes, and refuses every other name."""

    path = ""

    def find_class(self, module: str, name: str) -> Any:
        """Raises CheckpointUntrusted (GA415)."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _ALLOWED.get(module, ()):
            raise CheckpointUntrusted(path=self.path, named=f"{module}.{name}")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a checkpoint that holds tensors alone, each covered by its parts.

    Raises CheckpointUntrusted (GA415) where it names anything else, CheckpointDamaged (GA413).
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            reader = _MetadataUnpickler(file)
            reader.path = str(path)
            metadata = reader.load()
        problem = _problem(metadata)
    except CheckpointUntrusted:
        raise
    except Exception as error:  # a damaged pickle raises anything
        problem = f"it is no pickle of metadata ({type(error).__name__})"
    if problem:
        raise CheckpointDamaged(path=str(path), problems=(problem,))
    return metadata


def _problem(metadata: Any) -> str:
    """Why a metadata cannot be followed; empty where it can."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        return "it is no metadata of torch.distributed.checkpoint"
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            return f"{name} is no tensor"
        covered = 0
        for chunk in tensor.chunks:
            ends = [a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)]
            if min((*chunk.offsets, 0)) < 0 or any(
                end > size for end, size in zip(ends, tensor.size, strict=True)
            ):
                return f"a part of {name} is outside of it"
            covered += prod(chunk.sizes)
        if covered != prod(tensor.size):
            return f"the parts of {name} hold {covered} of its {prod(tensor.size)} values"
    for info in metadata.storage_data.values():
        name = str(info.relative_path)
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            return f"it names {name!r}, which is no file of this folder"
    return ""


class TrustedReader(FileSystemReader):
    """DCP's reader of a folder, with metadata that `read_metadata` has checked, and tensors whose
    checksums it has checked: torch writes them, and reads them without a look.

    before: the complete checkpoint before this one, for the error."""

    def __init__(self, folder: Path, before: str) -> None:
        super().__init__(folder)
        self._before = before

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata of the whole checkpoint."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part, once all of it is known to be as written.

        Raises CheckpointDamaged (GA413).
        """
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            path = Path(self.path) / part.relative_path
            with path.open("rb") as file:
                file.seek(part.offset)
                content = io.BytesIO(file.read(part.length))
            if not _as_written(content):
                name = item.storage_index.fqn
                problem = f"{part.relative_path} holds other bytes for {name} than were written"
                raise CheckpointDamaged(
                    path=str(self.path), problems=(problem,), before=self._before
                )
        return super().read_data(plan, planner)


def _as_written(content: io.BytesIO) -> bool:
    """Whether the checksums in what `torch.save` wrote are those of what is there."""
    try:
        with zipfile.ZipFile(content) as parts:
            return parts.testzip() is None
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError):
        return False


def load_values(path: Path, *, lazily: bool = False) -> Any:
    """What `torch.save` wrote: tensors, on the CPU, and plain values.

    lazily: tensors stay in the file until they are read.

    Raises CheckpointUntrusted (GA415), CheckpointDamaged (GA413).
    """
    mapped = lazily
    while True:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            named = _NAMED.search(str(error))
            if named is not None:
                raise CheckpointUntrusted(path=str(path), named=named[1]) from None
            raise CheckpointDamaged(
                path=str(path), problems=("it was not written by torch.save",)
            ) from None
        except Exception as error:  # a damaged file raises anything
            if mapped and "mmap" in str(error):  # a file of a torch before 1.6 cannot be mapped
                mapped = False
                continue
            line = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointDamaged(path=str(path), problems=(line[:200],)) from None
