"""`graphaccel.load`: resume from a checkpoint, or start from a file of weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from graphaccel.checkpoint.contents import (
    OF_ALL,
    OF_THE_RUN,
    Contents,
    Target,
    described,
    in_words,
    local,
    local_memory,
    state_name,
    target,
)
from graphaccel.checkpoint.folders import (
    CompleteCheckpoint,
    complete,
    has_checkpoints,
    is_step,
    is_there,
    newest,
)
from graphaccel.checkpoint.manifest import NAME, check_content, check_files, read_manifest
from graphaccel.checkpoint.of_rank import with_own_values
from graphaccel.checkpoint.random_state import set_random_states, valid_random_states
from graphaccel.checkpoint.save import RESERVED, contents_of, folder_of, reserve_early
from graphaccel.checkpoint.saver import saver_of
from graphaccel.checkpoint.together import Together
from graphaccel.checkpoint.trusted import METADATA, TrustedReader, load_values, read_metadata
from graphaccel.checkpoint.weights import is_weights, load_weights
from graphaccel.checkpoint.writing import STATE, random_file
from graphaccel.compat.torch.checkpoint import load_tensors
from graphaccel.errors import CheckpointDamaged, CheckpointDiffers, GraphAccelError
from graphaccel.progress import progress
from graphaccel.runtime.agreement import LOAD
from graphaccel.runtime.parameters.remote import RemoteTensor

Optimizer = torch.optim.Optimizer
Kind = tuple[torch.dtype, torch.Size]


@dataclass(frozen=True)
class Loaded:
    """What was loaded. step: the number of steps done, 0 where there was no checkpoint.
    folder: the checkpoint's own, or the file of weights; None where there was none. more: the plain
    values that were given to `save`, by name."""

    step: int = 0
    folder: Path | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def load(
    folder: str | Path | None,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    weights: bool = True,
    asynchronous: bool = False,
    **more: Any,
) -> Loaded:
    """Continue from the newest complete checkpoint in `folder`, if there is one.

    Every rank calls it and reads its own part. The model may be a plain one, or optimized for any
    plan; with `example_batch=` its plan exists, so that only this rank's part is read. Restored are
    weights, optimizer state and settings, random states, the loss scale, and `more`.

    folder: of checkpoints (one that does not exist yet counts as empty), a single checkpoint in it,
      or weights alone: a file of `torch.save(state_dict)` or safetensors, or a Hugging Face folder.
      None: the one given by `graphaccel run --checkpoint`.
    optimizer: None loads the weights alone, to evaluate a model.
    weights: as for `save`.
    asynchronous: the saves of this run will be asynchronous: host memory for the first one is
      allocated in the background of the first step.
    more: models, optimizers and objects that were given to `save` under the same names.

    Returns the step to continue from, and the plain values that were saved. Only tensors and plain
    values are read: no code of a file is run.

    Raises on every rank, with the model unchanged: CheckpointDamaged (GA413), CheckpointDiffers
    (GA414) with names and shapes, CheckpointUntrusted (GA415). A file with changed content is found
    when it is read, after other tensors were.
    """
    if os.environ.get("GRAPHACCEL_PLAN_ONLY") == "1":  # nothing will be trained
        return Loaded()
    path = folder_of(folder)
    contents = contents_of(model, optimizer, more, weights)
    handle = getattr(model, "graphaccel", None)
    if handle is not None:
        handle.agree(LOAD)
    saver = saver_of(model)
    saver.wait()
    loaded = _loaded(path, contents, saver.together)
    if asynchronous:
        reserve_early(contents, saver)
    return loaded


def _loaded(path: Path, contents: Contents, together: Together) -> Loaded:
    """Load what is at a path. Collective."""
    fail = _failed(path)
    with _before_named(path):
        weights = together.first(lambda: is_weights(path) and not has_checkpoints(path), fail)
        chosen = None if weights else together.first(lambda: _chosen(path), fail)
    if weights:
        load_weights(path, contents.models["model"], together, fail)
        progress("loaded", f"{path}, weights alone", 0.0)
        return Loaded(folder=path)
    if chosen is None:
        progress("loaded", f"{path} has no checkpoint: this run starts at step 0", 0.0)
        return Loaded()
    with _before_named(chosen):
        checkpoint = together.here(lambda: _here(chosen), _failed(chosen))
        values = _restore(checkpoint, contents, together)
    progress("loaded", f"{checkpoint.folder}, step {checkpoint.manifest.step}", 0.0)
    return Loaded(checkpoint.manifest.step, checkpoint.folder, values)


def _failed(path: Path) -> Callable[[int, str], GraphAccelError]:
    return lambda rank, cause: CheckpointDamaged(
        path=str(path), problems=(f"rank {rank}: {cause}",)
    )


@contextmanager
def _before_named(folder: Path) -> Iterator[None]:
    """Errors about a checkpoint name the one before it."""
    try:
        yield
    except CheckpointDamaged as error:
        if error.before or not (before := _earlier(folder)):
            raise
        path, problems = error.path, error.problems
        raise CheckpointDamaged(path=path, problems=problems, before=before) from error.__cause__


def _earlier(path: Path) -> str:
    """The newest complete checkpoint beside one that may not be readable, of an earlier step."""
    try:
        older = [c for c in complete(path.parent) if c.folder.name < path.name]
    except OSError:  # the folder of all of them can not be read, either
        older = []
    return str(older[-1].folder) if older and is_step(path) else ""


def _chosen(path: Path) -> Path | None:
    """The folder of the checkpoint that a path means; None where there is none yet."""
    if (path / NAME).is_file():
        return path
    problem = ""
    if not is_there(path):
        problem = "there is no such checkpoint" if is_step(path) else ""
    elif not path.is_dir():
        problem = "it is not a folder of checkpoints, a state dict (.pt) or safetensors"
    elif is_step(path) or (path / METADATA).is_file():
        problem = f"it is not complete: it has no {NAME}, which `graphaccel.save` writes last"
    if problem:
        older = complete(path.parent) if is_step(path) else []
        before = str(older[-1].folder) if older else ""
        raise CheckpointDamaged(path=str(path), problems=(problem,), before=before)
    checkpoint = newest(path)
    return None if checkpoint is None else checkpoint.folder


def _here(folder: Path) -> CompleteCheckpoint:
    """The checkpoint as this rank sees it, its files checked."""
    manifest = read_manifest(folder)
    problems = check_files(folder, manifest)
    if not problems and not {STATE, random_file(0), ".metadata"} <= set(manifest.files):
        problems = (f"{NAME} does not name {STATE}, {random_file(0)} and .metadata",)
    if not problems:
        known = read_metadata(folder)
        tensors = known.state_dict_metadata.items()
        there = {
            name: (t.properties.dtype, t.size)
            for name, t in tensors
            if isinstance(t, TensorStorageMetadata)
        }
        written = {str(info.relative_path) for info in known.storage_data.values()}
        if missing := sorted(written - set(manifest.files)):
            problems = (f"{NAME} does not name {missing[0]}",)
        elif there != manifest.shapes:
            problems = (f"{NAME} lists other tensors than .metadata",)
        else:
            problems = check_content(folder, manifest, [".metadata"])
    if problems:
        before = _before(folder, manifest.number)
        raise CheckpointDamaged(path=str(folder), problems=problems, before=before)
    return CompleteCheckpoint(folder, manifest)


def _before(folder: Path, number: int) -> str:
    """The newest complete checkpoint beside a folder with a lower number, or ""."""
    older = [each for each in complete(folder.parent) if each.manifest.number < number]
    return str(older[-1].folder) if older else ""


def _restore(
    checkpoint: CompleteCheckpoint, contents: Contents, together: Together
) -> dict[str, Any]:
    """Load everything of one checkpoint; returns the plain values. Collective."""
    fail = _failed(checkpoint.folder)
    before = _before(checkpoint.folder, checkpoint.manifest.number)

    def read() -> tuple[Any, Any]:
        state = load_values(checkpoint.folder / STATE)
        rank = together.rank if together.rank < checkpoint.manifest.ranks else 0
        random = load_values(checkpoint.folder / random_file(rank))
        manifest, names = checkpoint.manifest, (STATE, random_file(rank))
        if problems := check_content(checkpoint.folder, manifest, names):  # once they are trusted
            raise CheckpointDamaged(path=str(checkpoint.folder), problems=problems, before=before)
        if not valid_random_states(random):
            problem = f"{random_file(rank)} does not hold the random states of a rank"
            raise CheckpointDamaged(path=str(checkpoint.folder), problems=(problem,), before=before)
        _check_state(checkpoint, state)
        _check_fits(checkpoint, contents, state)
        return with_own_values(state, random, together, manifest.ranks), random

    state, random = together.here(read, fail)
    together.here(lambda: _set_objects(checkpoint, contents, state["objects"]), fail)
    targets, states = _targets(checkpoint, contents)
    reader = TrustedReader(checkpoint.folder, before)
    with torch.no_grad():
        together.collective(lambda: load_tensors(targets, reader, together.group), fail)
    _set_states(contents, states, state["values"])
    _set_groups(contents, state["groups"])
    contents.set_extra_states(state["extra"])
    scale = state["scale"]  # of the model alone
    contents.set_scales(state.get("scales", {} if scale is None else {"model": scale}))
    set_random_states(random)
    _name_what_is_left_out(checkpoint, contents, state)
    return dict(state["more"])


def _set_objects(
    checkpoint: CompleteCheckpoint, contents: Contents, states: Mapping[str, Any]
) -> None:
    """Give objects their states. Raises CheckpointDiffers (GA414) where one does not take it."""
    for name, value in contents.objects.items():
        try:
            value.load_state_dict(states[name])
        except Exception as error:  # of the user's object
            changed = f"{name}: {type(error).__name__}: {error}"
            raise CheckpointDiffers(path=str(checkpoint.folder), changed=(changed,)) from error


def _name_what_is_left_out(
    checkpoint: CompleteCheckpoint, contents: Contents, state: Mapping[str, Any]
) -> None:
    """Say which parts of the run stay as they are because the call does not name them.

    A call with models alone is meant to evaluate them, and leaves out the others on purpose.
    """
    given = {*contents.models, *contents.optimizers, *contents.objects}
    saved = dict.fromkeys(name for kind in ("groups", "objects", "extra") for name in state[kind])
    if out := [name for name in saved if name not in given and given > {*contents.models}]:
        own = ["optimizer"] if "optimizer" in {*out, *contents.optimizers} else []
        named = [
            f"{name}={name}"
            for name in dict.fromkeys([*given, *out])
            if name not in RESERVED and "." not in name  # inside of another optimizer
        ]
        call = ", ".join(["graphaccel.load(folder", "model", *own, *sorted(named)]) + ")"
        what = f"{', '.join(out)} of {checkpoint.folder}, not loaded: {call}"
        progress("left out", what, 0.0)


def _check_state(checkpoint: CompleteCheckpoint, state: Any) -> None:
    expected = ("groups", "values", "extra", "objects", "more")
    parts = {"classes": {}, **state} if isinstance(state, dict) else {}  # older ones have none
    if not all(isinstance(parts.get(name), dict) for name in (*expected, "classes")):
        problem = "it is not the state of a run"
        raise CheckpointDamaged(path=str(checkpoint.folder / STATE), problems=(problem,))


def _check_fits(
    checkpoint: CompleteCheckpoint, contents: Contents, state: Mapping[str, Any]
) -> None:
    """Raise CheckpointDiffers (GA414) where names or shapes differ."""
    saved = checkpoint.manifest.shapes
    wanted = {name: (t.dtype, t.shape) for name, t in contents.weights().items()}
    models = tuple(f"{name}." for name in contents.models)
    of_states = tuple(f"{name}.state." for name in state["groups"])
    in_file = {n: k for n, k in saved.items() if n.startswith(models) and not _under(n, of_states)}
    missing = [*described({n: k for n, k in wanted.items() if n not in saved})]
    unexpected = [*described({n: k for n, k in in_file.items() if n not in wanted})]
    changed = [
        f"{name} {in_words(saved[name])}, here {in_words(kind)}"
        for name, kind in wanted.items()
        if name in saved and saved[name] != kind
    ]
    classes, here = state.get("classes", {}), contents.classes()
    other = {name: kind for name, kind in here.items() if classes.get(name, kind) != kind}
    changed += [f"{name}: {classes[name]}, here {kind}" for name, kind in other.items()]
    for name, optimizer in contents.optimizers.items():
        groups = state["groups"].get(name)
        if groups is None:
            missing.append(f"{name}, a {type(optimizer).__name__}")
        elif name not in other:
            changed += _other_groups(name, contents.names(optimizer), groups)
    missing += [name for name in contents.objects if name not in state["objects"]]
    if missing or unexpected or changed:
        raise CheckpointDiffers(
            path=str(checkpoint.folder),
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            changed=tuple(changed),
        )


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return bool(prefixes) and name.startswith(prefixes)


def _other_groups(name: str, here: list[list[str]], groups: Any) -> list[str]:
    """How the parameter groups of an optimizer differ from the saved ones."""
    if len(groups) != len(here):
        return [f"{name} has {len(groups)} parameter groups, here {len(here)}"]
    differences = []
    for number, (names, group) in enumerate(zip(here, groups, strict=True)):
        others = sorted(set(names) ^ set(group["params"]))
        if others or len(names) != len(group["params"]):
            differences.append(
                f"{name}: parameter group {number} has others: {', '.join(others[:5])}"
            )
    return differences


def _targets(
    checkpoint: CompleteCheckpoint, contents: Contents
) -> tuple[dict[str, Tensor], dict[str, dict[str, dict[str, Tensor]]]]:
    """Memory of this rank to read into, by the name in the checkpoint; that of optimizer state also
    by the names of optimizer, parameter and value."""
    targets = local(contents.weights())
    states: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, optimizer in contents.optimizers.items():
        where = Target(contents.layouts(optimizer), contents.on_host(optimizer))
        prefix = f"{name}.state."
        parameters = contents.parameters(optimizer)
        states[name] = {}
        for full, kind in checkpoint.manifest.shapes.items():
            parameter, _, key = full.removeprefix(prefix).rpartition(".")
            if full.startswith(prefix) and parameter in parameters:
                built = target(optimizer, parameters[parameter], key, kind, where)
                if built is not None:
                    targets[state_name(name, parameter, key)] = built
                    states[name].setdefault(parameter, {})[key] = built
    return targets, states


def _set_states(
    contents: Contents,
    states: Mapping[str, Mapping[str, Mapping[str, Tensor]]],
    values: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> None:
    """Give the loaded state to the optimizers."""
    for name, optimizer in contents.optimizers.items():
        if contents.without_plan:
            _drop_other_stages(optimizer)
        for key, value in values.get(name, {}).get(OF_ALL, {}).items():
            cast("dict[Any, Any]", optimizer.state)[key] = value
        layouts = contents.layouts(optimizer)
        for parameter, p in contents.parameters(optimizer).items():
            tensors = states[name].get(parameter, {})
            if id(p) in layouts:
                tensors = {key: local_memory(value) for key, value in tensors.items()}
            plain = values.get(name, {}).get(parameter, {})
            optimizer.state.pop(p, None)
            if tensors or plain:
                optimizer.state[p] = {**tensors, **plain}


def _drop_other_stages(optimizer: Optimizer) -> None:
    """Before its first step, drop the state of parameters that a plan has put on other ranks since:
    those of an optimizer that `optimize` was not given are not known there."""

    def drop(*_: Any) -> None:
        hook.remove()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, RemoteTensor):
                    optimizer.state.pop(p, None)

    hook = optimizer.register_step_pre_hook(drop)


def _set_groups(contents: Contents, groups: Mapping[str, Any]) -> None:
    """Set the settings of the parameter groups; a learning rate in a tensor stays in it."""
    for name, optimizer in contents.optimizers.items():
        for group, saved in zip(optimizer.param_groups, groups[name], strict=True):
            for key, value in saved.items():
                if key in OF_THE_RUN:
                    continue
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
