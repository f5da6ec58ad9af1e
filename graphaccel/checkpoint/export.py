"""`graphaccel.export`: weights as safetensors, as `save_pretrained` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graphaccel.checkpoint.contents import plain_state
from graphaccel.checkpoint.saver import saver_of
from graphaccel.checkpoint.weights import tied_names
from graphaccel.errors import CheckpointNotSaved, GraphMisuse
from graphaccel.runtime.agreement import SAVE
from graphaccel.runtime.module import original_class
from graphaccel.runtime.parameters.state import whole_tensor

_SHARD = 5 * 2**30
_INDEX = "model.safetensors.index.json"
_EXPORTED = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
"""Names of the files that hold weights; a folder may have others."""


def export(folder: str | Path, model: nn.Module, *, max_shard_bytes: int = _SHARD) -> None:
    """Write the weights of a model, plain or under any plan, as safetensors into `folder`.

    Every rank calls it; rank 0 writes one file after the other, so that no rank holds more of the
    model than its own part and one file. A Hugging Face model's configuration is written beside
    them: `from_pretrained` reads the folder. Tied tensors are written once.

    max_shard_bytes: of one file; more than one get an index, as `save_pretrained` writes it.

    Raises CheckpointNotSaved (GA412) on every rank if a file cannot be written; GraphMisuse (GA407)
    without the package safetensors.
    """
    if not isinstance(model, nn.Module):
        raise GraphMisuse(what=f"the model is a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(folder, (str, Path)):
        raise GraphMisuse(what=f"the folder of the weights is {folder!r}")
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise GraphMisuse(what=f"max_shard_bytes is a whole number from 1, not {max_shard_bytes!r}")
    handle = getattr(model, "graphaccel", None)
    if handle is not None:
        handle.agree(SAVE)
    together = saver_of(model).together
    root = Path(folder)

    def failed(rank: int, cause: str) -> CheckpointNotSaved:
        return CheckpointNotSaved(
            what="the weights",
            folder=str(root),
            rank=rank,
            cause=cause,
            call="graphaccel.export('weights', model)",
        )

    together.first(lambda: _prepare(root), failed)
    state = {n: t for n, t in plain_state(model).items() if isinstance(t, Tensor)}
    for name in _left_out(model):
        state.pop(name, None)
    files = _files(state, max_shard_bytes)
    session = None if handle is None else handle.session
    try:
        for file, names in files.items():
            whole = {}
            for name in names:
                tensor = together.collective(
                    lambda name=name: whole_tensor(session, name, state[name])
                )
                if together.rank == 0:
                    whole[name] = tensor.cpu().contiguous().clone()
            together.first(lambda file=file, whole=whole: _write(root / file, whole), failed)
        together.first(lambda: _replace(root, files, state), failed)
    finally:
        if together.rank == 0:  # where one failed: their room may be what is missing
            _remove_new(root, files)
    together.first(lambda: _write_configs(root, model), failed)


def _prepare(root: Path) -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise GraphMisuse(
            what="the package safetensors, which writes these files, is not installed",
            help_line="pip install safetensors",
        ) from None
    root.mkdir(parents=True, exist_ok=True)


def _left_out(model: nn.Module) -> set[str]:
    """Names of tied tensors, but for the one that is written."""
    keys = getattr(model, "_tied_weights_keys", None) or ()
    results: set[str] = set()
    for names in tied_names(model).values():
        later = [name for name in names if name in keys]
        kept = next((name for name in names if name not in later), names[0])
        results |= set(names) - {kept}
    return results


def _files(state: Mapping[str, Tensor], most: int) -> dict[str, list[str]]:
    """File name → the tensors in it."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    count = len(parts)
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": p for i, p in enumerate(parts)}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    try:
        save_file(tensors, _new(path), metadata={"format": "pt"})
    except OSError:
        raise
    except Exception as error:  # the package has errors of its own
        raise OSError(str(error)) from error


def _new(path: Path) -> Path:
    """Where a file is until all are written."""
    return path.with_name(f"{path.name}.new")


def _remove_new(root: Path, files: Iterable[str]) -> None:
    """Remove what was not renamed into place."""
    for file in (*files, _INDEX):
        with suppress(OSError):
            _new(root / file).unlink()


def _replace(root: Path, files: Mapping[str, list[str]], state: Mapping[str, Tensor]) -> None:
    """Rename the files into place, without an index meanwhile: it would name files of two models.

    Weights of an earlier export, which would be read instead of these, are removed.
    """
    index = root / _INDEX
    if len(files) > 1:
        size = sum(t.numel() * t.element_size() for t in state.values())
        where = {name: file for file, names in files.items() for name in names}
        content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        _new(index).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    index.unlink(missing_ok=True)
    for path in root.iterdir():
        if _EXPORTED.fullmatch(path.name) and path.name not in files:
            path.unlink()
    for file in files:
        _new(root / file).replace(root / file)
    if len(files) > 1:
        _new(index).replace(index)


def _write_configs(root: Path, model: nn.Module) -> None:
    """A Hugging Face model's configuration."""
    configs: list[Any] = [getattr(model, n, None) for n in ("config", "generation_config")]
    for config in configs:
        write = getattr(config, "save_pretrained", None)
        if write is not None:
            if config is getattr(model, "config", None):
                config.architectures = [original_class(model).__name__]
            write(root)
