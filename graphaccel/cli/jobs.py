"""Finds the model and batch to plan or measure: from a function of a user's file, or a script."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphaccel.api import PLAN_ONLY, PlanRequested
from graphaccel.arguments import check_job
from graphaccel.capture.batch import Batch, batch_leaves, batch_size
from graphaccel.capture.batch_dims import BatchDims, check_batch_dims, given_dims
from graphaccel.capture.export.export import LossFn
from graphaccel.compiler.model import as_batch
from graphaccel.errors import GraphMisuse
from graphaccel.runtime.module import original_class


@dataclass(frozen=True)
class Job:
    """What to plan. pins: the script's; the command line's take precedence. batch_dims: as for
    `graphaccel.optimize`. local: the batch is what one rank gives of it."""

    model: nn.Module
    batch: Batch
    loss_fn: LossFn | None = None
    optimizer: torch.optim.Optimizer | None = None
    pins: Mapping[str, Any] = field(default_factory=dict)
    batch_dims: BatchDims = None
    local: bool = False


def find_job(file: Path, function: str | None) -> Job:
    """The job of `function` in `file`, or of the script `file`. Raises GraphMisuse (GA407)."""
    return job_of_script(file) if function is None else job_of_function(file, function)


def batch_asked(size: int | None, job: Job, devices: int) -> int | None:
    """The global batch size to plan for, where it is not the job's own: the size of the command
    line, or that of all ranks where the script's batch is what one rank gives."""
    if size is not None or not job.local:
        return size
    said, forward = job.batch_dims, original_class(job.model).forward
    dims = batch_leaves(job.batch)[1]
    if said is not None:
        dims = given_dims(job.batch, said, forward)
    return devices * batch_size(job.batch, dims)


def job_of_function(file: Path, name: str) -> Job:
    """The job that the function `name` of `file` returns: (model, example_batch[, loss_fn[,
    optimizer[, batch_dims]]]).

    Raises GraphMisuse (GA407) where there is no such function, or it returns something else.
    """
    form = "return model, example_batch, loss_fn, optimizer, batch_dims  # the last 3 if needed"
    module_name = f"graphaccel plan {file.stem}"  # no import statement can name it
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise GraphMisuse(what=f"{file} is not a Python file", help_line="name it model.py")
    module = importlib.util.module_from_spec(spec)
    with _first_on_path(file.resolve().parent), _without_arguments(file):
        sys.modules[module_name] = module  # dataclasses look their module up there
        try:
            spec.loader.exec_module(module)
            function = getattr(module, name, None)
            if not callable(function):
                raise GraphMisuse(
                    what=f"{file} has no function `{name}`", help_line=f"def {name}(): {form}"
                )
            built = function()
        finally:
            del sys.modules[module_name]
    if (
        not isinstance(built, tuple)
        or not 2 <= len(built) <= 5
        or not isinstance(built[0], nn.Module)
    ):
        raise GraphMisuse(
            what=f"{file}:{name} returned {_described(built)}, not a model and its example batch",
            help_line=form,
        )
    given: tuple[Any, ...] = (*built, None, None, None)[:5]
    model, example, loss_fn, optimizer, batch_dims = given
    check_job(model, optimizer, {}, loss_fn)
    check_batch_dims(batch_dims)
    return Job(model, as_batch(example), loss_fn, optimizer, batch_dims=batch_dims)


def job_of_script(file: Path) -> Job:
    """What a training script passes to `optimize()`; runs the script until that call.

    Raises GraphMisuse (GA407) for a script that ends before it trains under `optimize()`.
    """
    print(f"graphaccel: running {file} up to its first training batch", file=sys.stderr)
    request, ended = None, ""
    printed = redirect_stdout(sys.stderr)  # standard output is the plan's
    with _first_on_path(file.resolve().parent), _as_script(file), printed:
        try:
            runpy.run_path(str(file), run_name="__main__")
        except PlanRequested as found:
            request = found
        except SystemExit as end:
            ended = f", by sys.exit({'' if end.code is None else repr(end.code)}),"
    if request is None:
        raise GraphMisuse(
            what=f"{file} ended{ended} without training a model under graphaccel.optimize()",
            help_line="model, optimizer = graphaccel.optimize(model, optimizer)",
        )
    model, example = request.model, request.example
    model.__class__ = original_class(model)
    batch = example if isinstance(example, Batch) else as_batch(example)
    return Job(
        model, batch, request.loss_fn, request.optimizer, request.pins, request.batch_dims,
        request.local,
    )  # fmt: skip


def _described(built: Any) -> str:
    if isinstance(built, tuple):
        return f"({', '.join(type(x).__name__ for x in built)})"
    return f"a {type(built).__name__}"


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Put the folder first on `sys.path`, as `python file.py` does, so that the file finds the
    modules beside it."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _without_arguments(file: Path) -> Iterator[None]:
    """Set `sys.argv` as for a script without arguments, for one that reads them where it begins."""
    argv = sys.argv
    sys.argv = [str(file)]
    try:
        yield
    finally:
        sys.argv = argv


@contextmanager
def _as_script(file: Path) -> Iterator[None]:
    """The same, and make `optimize` only plan."""
    before = os.environ.get(PLAN_ONLY)
    os.environ[PLAN_ONLY] = "1"
    try:
        with _without_arguments(file):
            yield
    finally:
        if before is None:
            del os.environ[PLAN_ONLY]
        else:
            os.environ[PLAN_ONLY] = before
