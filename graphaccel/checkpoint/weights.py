"""Weights alone, from files that others wrote: torch.save, safetensors, Hugging Face folders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.checkpoint.contents import described, in_words, plain_state
from graphaccel.checkpoint.together import Failed, Together
from graphaccel.checkpoint.trusted import load_values
from graphaccel.errors import CheckpointDamaged, CheckpointDiffers, GraphMisuse
from graphaccel.runtime.parameters.remote import RemoteTensor

_PICKLED = (".pt", ".pth", ".bin", ".ckpt")
_SAFE = ".safetensors"
_OF_A_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_PART = re.compile(r"(model|pytorch_model)-[0-9]{5}-of-[0-9]{5}\.(safetensors|bin)")
Kind = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class Weights:
    """The tensors of one or several files. kinds: of each, by name. read: one of them."""

    kinds: Mapping[str, Kind]
    read: Callable[[str], Tensor]


def is_weights(path: Path) -> bool:
    """Whether a path is a file of weights, or a folder with such files as Hugging Face has."""
    if path.suffix in (*_PICKLED, _SAFE):
        return not path.is_dir()
    return _named(path) is not None or _without_index(path) is not None


def _named(folder: Path) -> str | None:
    """The file of a folder that holds its weights, or says where they are."""
    return next((name for name in _OF_A_FOLDER if (folder / name).is_file()), None)


def _without_index(folder: Path) -> str | None:
    """The index that is missing, where a folder has one of several files of weights."""
    paths = folder.iterdir() if folder.is_dir() else ()
    parts = (_PART.fullmatch(path.name) for path in paths)
    return next((f"{part[1]}.{part[2]}.index.json" for part in parts if part), None)


def load_weights(path: Path, model: nn.Module, together: Together, failed: Failed) -> None:
    """Load weights into a model, plain or under any plan, one tensor at a time. Collective.

    Raises CheckpointDiffers (GA414) where names or shapes do not fit; CheckpointDamaged (GA413),
    CheckpointUntrusted (GA415).
    """

    def matched() -> tuple[Weights, dict[str, str]]:
        weights = open_weights(path)
        return weights, _matched(path, weights.kinds, model)

    weights, names = together.here(matched, failed)

    def copy() -> None:
        state = plain_state(model)
        with torch.no_grad():
            for own, name in names.items():
                if not isinstance(state[own], RemoteTensor):
                    state[own].copy_(weights.read(name))

    together.each(copy, failed)


def open_weights(path: Path) -> Weights:
    """The tensors of a file, or of all files of a folder."""
    if not path.exists():
        raise CheckpointDamaged(path=str(path), problems=("there is no such file",))
    if path.is_file():
        return _of_file(path)
    name = _named(path)
    if name is None:
        problem = f"{_without_index(path)} is missing"
        raise CheckpointDamaged(path=str(path), problems=(problem,))
    if not name.endswith(".json"):
        return _of_file(path / name)
    parts = [_of_file(file) for file in _indexed(path / name)]
    where = {tensor: part for part in parts for tensor in part.kinds}
    kinds = {tensor: kind for part in parts for tensor, kind in part.kinds.items()}
    return Weights(kinds, lambda tensor: where[tensor].read(tensor))


def _indexed(index: Path) -> list[Path]:
    """The files of an index. Raises CheckpointDamaged (GA413)."""
    problem = "it is no index of files: weight_map is missing"
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted(set(names))
        if not all(isinstance(name, str) and "/" not in name for name in files):
            problem = "it names files outside of its folder"
        elif missing := [name for name in files if not (index.parent / name).is_file()]:
            problem = f"{missing[0]} is missing"
        else:
            return [index.parent / name for name in files]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointDamaged(path=str(index), problems=(problem,))


def _of_file(path: Path) -> Weights:
    if path.suffix == _SAFE:
        return _of_safetensors(path)
    result = _state_dict_in(load_values(path, lazily=True))
    if not isinstance(result, dict) or not all(isinstance(k, str) for k in result):
        raise CheckpointDamaged(path=str(path), problems=("it is no state dict",))
    tensors = {k: v for k, v in result.items() if isinstance(v, Tensor)}
    return Weights({k: (v.dtype, v.shape) for k, v in tensors.items()}, tensors.__getitem__)


def _state_dict_in(content: Any) -> Any:
    """The weights in what a file holds: scripts also save them under a name, beside the optimizer's
    state and numbers. Where several could be meant, none is."""
    if not isinstance(content, dict) or "state_dict" in content:
        return content["state_dict"] if isinstance(content, dict) else content
    inner = [v for v in content.values() if isinstance(v, dict) and v]
    weights = [v for v in inner if all(isinstance(each, Tensor) for each in v.values())]
    own = any(isinstance(v, Tensor) for v in content.values())
    return weights[0] if len(weights) == 1 and not own else content


def _of_safetensors(path: Path) -> Weights:
    try:
        from safetensors import safe_open
    except ImportError:
        raise GraphMisuse(
            what=f"`{path}` is read by the package safetensors, which is not installed",
            help_line="pip install safetensors",
        ) from None
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        kinds = {}
        for name in file.keys():
            part = file.get_slice(name)
            kinds[name] = (_dtype(file, name, part), torch.Size(part.get_shape()))
    except Exception as error:  # the package has errors of its own
        line = str(error).splitlines()[0]
        raise CheckpointDamaged(path=str(path), problems=(line[:200],)) from None
    return Weights(kinds, file.get_tensor)


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def _dtype(file: Any, name: str, part: Any) -> torch.dtype:
    known = _DTYPES.get(part.get_dtype())
    return file.get_tensor(name).dtype if known is None else known


def _matched(path: Path, kinds: Mapping[str, Kind], model: nn.Module) -> dict[str, str]:
    """Own name → name in the file, of every tensor of the model.

    Names may have, or lack, the prefix of a Hugging Face model without its head. Of tensors that
    are tied, one is enough. Dtypes may differ: values are converted, as `load_state_dict` does.
    """
    own = {k: v for k, v in plain_state(model).items() if isinstance(v, Tensor)}
    names = _names(kinds, own, model)
    tied = tied_names(model)
    missing = {
        n: (t.dtype, t.shape)
        for n, t in own.items()
        if n not in names and not any(other in names for other in tied.get(n, ()))
    }
    used, ignored = set(names.values()), _ignored(model)
    unexpected = {n: k for n, k in kinds.items() if n not in used and not _any(ignored, n)}
    changed = tuple(
        f"{n} {in_words(kinds[n])}, here {in_words((own[m].dtype, own[m].shape))}"
        for m, n in names.items()
        if kinds[n][1] != own[m].shape
    )
    if missing or unexpected or changed:
        raise CheckpointDiffers(
            path=str(path),
            missing=tuple(described(missing)),
            unexpected=tuple(described(unexpected)),
            changed=changed,
            weights=True,
        )
    return names


def _names(kinds: Iterable[str], own: Iterable[str], model: nn.Module) -> dict[str, str]:
    there = set(kinds)
    prefix = getattr(model, "base_model_prefix", "")
    ways: list[Callable[[str], str]] = [lambda name: name]
    if isinstance(prefix, str) and prefix:
        ways += [lambda name: f"{prefix}.{name}", lambda name: name.removeprefix(f"{prefix}.")]
    results = [{n: way(n) for n in own if way(n) in there} for way in ways]
    return max(results, key=len)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name of a parameter → all names of the same one."""
    by_identity: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(p), []).append(name)
    return {name: names for names in by_identity.values() for name in names}


def _ignored(model: nn.Module) -> list[str]:
    """Patterns of names that a Hugging Face model does not want from a file."""
    result = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [pattern for pattern in result if isinstance(pattern, str)]


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
