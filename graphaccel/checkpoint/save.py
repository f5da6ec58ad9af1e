"""`graphaccel.save`: a checkpoint of the whole run, complete or not there at all."""

from __future__ import annotations

import io
import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from graphaccel.checkpoint.contents import Contents, local, with_inner
from graphaccel.checkpoint.of_rank import own_values
from graphaccel.checkpoint.random_state import random_states
from graphaccel.checkpoint.saver import Saver, saver_of
from graphaccel.checkpoint.stopping import end_stopped
from graphaccel.checkpoint.together import Together
from graphaccel.checkpoint.writing import Job, as_file, not_saved
from graphaccel.errors import GraphMisuse
from graphaccel.progress import progress
from graphaccel.runtime.agreement import SAVE
from graphaccel.runtime.parameters.sharded import ShardTensor

Optimizer = torch.optim.Optimizer

FOLDER = "GRAPHACCEL_CHECKPOINT"
"""Environment variable with the folder of `graphaccel run --checkpoint FOLDER`."""
RESERVED = ("model", "optimizer")
_OURS = (ShardTensor, DTensor)
_DISPATCH = "__torch_dispatch__"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.Size)


@dataclass(frozen=True)
class Saved:
    """One checkpoint. folder: its own. seconds: how long training stood still for it."""

    step: int
    folder: Path
    seconds: float
    _saver: Saver = field(repr=False)

    def wait(self) -> None:
        """Wait until it is complete. Raises CheckpointNotSaved (GA412) if it cannot be."""
        self._saver.wait()


def save(
    folder: str | Path | None,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int,
    every: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    weights: bool = True,
    **more: Any,
) -> Saved | None:
    """Save a checkpoint of the run in a folder of its own inside `folder`.

    Saved are the model, the optimizer, the random states of all ranks, the loss scale, the plan,
    and `more`. Every rank calls it and writes its own part; the checkpoint counts as complete when
    all have, and until then `load` reads the one before. It loads under any plan, on any number of
    devices, and into the plain model.

    folder: of all checkpoints of the run. None: the one given by `graphaccel run --checkpoint`.
    step: the number of steps done.
    every: call it after every step; it saves after every `every`th one, and returns None for the
      others. When some rank is asked to stop (SIGTERM), it saves and ends the process with exit
      code 75, of `graphaccel run` too.
    keep: remove all but the newest `keep` complete checkpoints. Default: keep all.
    asynchronous: return when everything is copied to host memory, and write in the background. One
      save at a time: the next one waits for it, and raises its error. With `every`, or after
      `load(..., asynchronous=True)`, that memory is allocated in the background of the first step;
      else the first save takes longer for it.
    weights: False leaves out the tensors of the models, which then are in a file of their own;
      `load` is called with it too.
    more: by name, e.g. scheduler=scheduler, data=loader, ema=averaged, epoch=3: further models and
      optimizers, objects with `state_dict` and `load_state_dict`, and plain values (numbers, texts,
      tensors, lists and dicts of them).

    Raises CheckpointNotSaved (GA412) on every rank if one could not write its part: the checkpoints
    before are intact. GraphMisuse (GA407) for a value in `more` that is none of these.
    """
    started = time.monotonic()
    root = folder_of(folder).absolute()  # the script may change its folder before all is written
    _check(step, keep, every)
    contents = contents_of(model, optimizer, more, weights)
    saver = saver_of(model, SAVE)
    stops = False
    if every is not None:
        saver.stop.watch()
        stops = saver.stop.on_any(saver.together, step, every)
        if not stops and step % every:
            if asynchronous and saver.staging.empty:
                _reserve(contents, saver)
            return None
    asynchronous = asynchronous and not stops
    path = _written(contents, saver, root, step, keep, asynchronous)
    if stops:
        end_stopped(step, path, saver.together.rank)
    seconds = time.monotonic() - started
    how = "training goes on while it is written" if asynchronous else "complete"
    progress("saved", f"{path}, {how}", seconds)
    return Saved(step, path, seconds, saver)


def _written(
    contents: Contents, saver: Saver, root: Path, step: int, keep: int | None, asynchronous: bool
) -> Path:
    """Write a checkpoint, or start to, once the one before is done; its folder. Collective."""
    model = contents.models["model"]
    handle = getattr(model, "graphaccel", None)
    if handle is not None:
        handle.agree(SAVE)
    saver.wait()
    _same(saver.together, root, step, keep, asynchronous)
    together = saver.together_in_background(model) if asynchronous else saver.together
    tensors, state, own = _copied(contents, saver, root, step, asynchronous)
    plan = None if handle is None or handle.plan is None else json.loads(handle.plan.to_json())
    job = Job(together, root, step, tensors, state, own, plan, keep)
    path, number = job.open()
    if asynchronous:
        saver.start(job, path, number)
    else:
        job.write(path, number)
    return path


def folder_of(folder: str | Path | None) -> Path:
    """The folder that a script gave, or else `graphaccel run --checkpoint`."""
    given = os.environ.get(FOLDER) if folder is None else folder
    if not given or not isinstance(given, (str, Path)):
        raise GraphMisuse(
            what=f"the folder of the checkpoints is {folder!r}",
            help_line="name one in the script, or start it by:  "
            "graphaccel run --devices 2 --checkpoint checkpoints train.py",
        )
    return Path(given)


def contents_of(
    model: nn.Module, optimizer: Optimizer | None, more: Mapping[str, Any], weights: bool = True
) -> Contents:
    """What is saved or loaded, sorted by how. Raises GraphMisuse (GA407)."""
    if not isinstance(model, nn.Module):
        raise GraphMisuse(what=f"the model is a torch.nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise GraphMisuse(
            what=f"the optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if taken := [name for name in more if name in RESERVED]:
        raise GraphMisuse(what=f"`{taken[0]}` is given twice")
    models = {k: v for k, v in more.items() if isinstance(v, nn.Module)}
    optimizers = {k: v for k, v in more.items() if isinstance(v, Optimizer)}
    rest = {k: v for k, v in more.items() if k not in models and k not in optimizers}
    objects = {k: v for k, v in rest.items() if hasattr(v, "load_state_dict")}
    values = {k: v for k, v in rest.items() if k not in objects}
    if any(p.is_meta for p in nn.Module.parameters(model)):
        raise GraphMisuse(
            what="the model is on the meta device until it has a plan",
            help_line="graphaccel.optimize(model, optimizer, example_batch=batch)",
        )
    own = {} if optimizer is None else {"optimizer": optimizer}
    all_optimizers = with_inner(own | optimizers)
    return Contents({"model": model, **models}, all_optimizers, objects, values, weights)


def _check(step: int, keep: int | None, every: int | None) -> None:
    if type(step) is not int or step < 0:
        raise GraphMisuse(what=f"step is a whole number from 0, not {step!r}")
    for name, value in (("keep", keep), ("every", every)):
        if value is not None and (type(value) is not int or value < 1):
            raise GraphMisuse(what=f"{name} is a whole number from 1, not {value!r}")


def _same(together: Together, root: Path, step: int, keep: int | None, asynchronous: bool) -> None:
    """Raise GraphMisuse (GA407) on every rank where they save differently."""
    mine = str(root), step, keep, asynchronous
    asked = together.each(lambda: mine, lambda _, cause: GraphMisuse(what=cause))
    odd = next((rank for rank, this in enumerate(asked) if this != asked[0]), None)
    if odd is not None:
        first, other = (
            f"step {number} in `{folder}`, keep={kept}, asynchronous={later}"
            for folder, number, kept, later in (asked[0], asked[odd])
        )
        raise GraphMisuse(
            what=f"rank 0 saves {first}, and rank {odd} {other}",
            help_line="give every rank the same arguments",
        )


def _copied(
    contents: Contents, saver: Saver, root: Path, step: int, asynchronous: bool
) -> tuple[dict[str, torch.Tensor], bytes, bytes]:
    """Tensors to write, and the rest as files: of all ranks, and of this one. Collective."""
    states, plain = contents.states()
    tensors = _tensors(contents, states)

    def known() -> dict[str, dict[str, dict[str, Any]]]:
        _check_classes(tensors)
        return plain

    others = saver.together.each(known, lambda _, cause: GraphMisuse(what=cause))
    merged = {
        name: {k: v for result in reversed(others) for k, v in result[name].items()}
        for name in plain
    }
    scales = contents.scales()
    state = {
        "groups": contents.groups(),
        "classes": contents.classes(),
        "values": merged,
        "extra": contents.extra_states(),
        "objects": saver.together.here(contents.object_states, lambda _, c: GraphMisuse(what=c)),
        "more": dict(contents.values),
        "scale": scales.get("model"),  # earlier versions read this one
        "scales": scales,
    }
    content = saver.together.here(lambda: _plain_file(state), partial(not_saved, root, step))
    own = as_file({**random_states(), **own_values(saver.together, state)})
    return (saver.staging.copy(tensors) if asynchronous else tensors), content, own


def _reserve(contents: Contents, saver: Saver) -> None:
    """Allocate host memory for the first asynchronous save, once optimizers have their state."""
    states = contents.states()[0]
    if states or not contents.optimizers:
        saver.staging.reserve(_tensors(contents, states))


def reserve_early(contents: Contents, saver: Saver) -> None:
    """Allocate host memory for the first asynchronous save in the background: now, or after the
    first step of an optimizer that has no state yet."""
    if contents.states()[0] or not contents.optimizers:
        _reserve(contents, saver)
        return

    def after_step_of(optimizer: Optimizer) -> None:
        waiting = [True]

        def reserve(*_: Any) -> None:
            if waiting and waiting.pop():  # a hook that removes itself is an error of torch's
                _reserve(contents, saver)

        optimizer.register_step_post_hook(reserve)

    for optimizer in contents.optimizers.values():
        after_step_of(optimizer)


def _tensors(contents: Contents, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that this rank writes: weights, and `states` of optimizers."""
    held = local({**contents.weights(), **states})
    return {name: tensor.detach() for name, tensor in held.items()}


def _check_classes(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise GraphMisuse (GA407) for a tensor that is made of others, as quantized ones are: what
    its class adds to them would not be restored."""
    for name, tensor in tensors.items():
        kind = type(tensor)
        plain = getattr(kind, _DISPATCH) is getattr(torch.Tensor, _DISPATCH)
        if plain or isinstance(tensor, _OURS):
            continue
        of_optimizer = ".state." in name
        raise GraphMisuse(
            what=f"`{name}` is a {kind.__module__}.{kind.__qualname__}, which a checkpoint does "
            "not hold",
            help_line="save the model alone:  graphaccel.save(folder, model, step=step)"
            if of_optimizer
            else "save the rest, with weights=False, and these by the library that made them",
        )


def _plain_file(state: Mapping[str, Any]) -> bytes:
    """The file of everything but tensors, once it is known that it can be loaded again."""
    try:
        built = as_file(dict(state))
        torch.load(io.BytesIO(built), weights_only=True)
        return built
    except Exception as error:
        whole = error
    for kind in ("more", "objects", "extra", "values", "groups"):
        for name, value in state[kind].items():
            try:
                torch.load(io.BytesIO(as_file(value)), weights_only=True)
            except Exception:
                odd = _not_plain(value) or f"a part of this {type(value).__name__}"
                raise GraphMisuse(
                    what=f"`{name}` is saved with more than tensors and plain values: {odd}",
                    help_line="save what it is made of: numbers, texts, tensors, lists and dicts",
                ) from None
    raise whole


def _not_plain(value: Any, place: str = "") -> str | None:
    """The class of the first part of a value that `load` does not read, and where it is."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        parts = [(f"{place}[{key!r}]", each) for key, each in value.items()]
    elif kind in (list, tuple, set):
        parts = [(f"{place}[{number}]", each) for number, each in enumerate(value)]
    elif kind in _PLAIN:
        return None
    else:
        return f"{place or 'it'} is a {kind.__module__}.{kind.__qualname__}"
    inside = (_not_plain(each, where) for where, each in parts)
    return next((odd for odd in inside if odd is not None), None)
