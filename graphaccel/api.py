"""The public functions; `optimize` reads top to bottom: capture, planner, passes, runtime."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from graphaccel.arguments import (
    GLOBAL,
    LOCAL,
    MAX_PROGRAMS,
    asked_pins,
    check_arguments,
    check_job,
    check_run,
    check_settings,
    check_whole,
    device_count,
    plan_path,
    runnable_plan,
    with_checkpointing,
)
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.batch_dims import BatchDims
from graphaccel.capture.export.export import LossFn, split_targets
from graphaccel.compiler.capacity import Fit, fit_of
from graphaccel.compiler.capacity import fewest_devices as fewest
from graphaccel.compiler.capacity import largest_batch as largest
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.device_move import on_device
from graphaccel.compiler.model import as_batch, check_supported, model_of
from graphaccel.dispatch.optimizers import keeping_parameters_whole
from graphaccel.dispatch.run import Run, RunSettings
from graphaccel.dispatch.uncaught import hooked
from graphaccel.errors import GraphMisuse
from graphaccel.optimized_model import Handle
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.catalogue import host_memory
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.detect import DetectedDevice, detected_cluster
from graphaccel.planner.plan.pin_types import PinArguments
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.broadcast import same_on_all_ranks
from graphaccel.runtime.deferred import initial_values
from graphaccel.runtime.environment import join_job
from graphaccel.runtime.inductor.compile import here
from graphaccel.runtime.init_tape import InitTape
from graphaccel.runtime.launch import check_devices, ensure_launched
from graphaccel.runtime.module import attach
from graphaccel.runtime.parameters.sharded_optimizer import is_elementwise
from graphaccel.runtime.parameters.state import whole_value
from graphaccel.runtime.rendezvous import meeting_by_variables
from graphaccel.runtime.wrappers import refuse_on

PLAN_ONLY = "GRAPHACCEL_PLAN_ONLY"
"""`graphaccel plan script.py` sets it to 1 for the script: optimize() then raises PlanRequested."""

Optimizer = torch.optim.Optimizer


class Settings(PinArguments, total=False):
    """Keyword arguments of `optimize`."""

    devices: int | None
    loss_fn: LossFn | None
    init_fn: Callable[[], nn.Module] | None
    example_batch: Any
    plan: str | Path | Plan | None
    cluster: Cluster | None
    clip_norm: float | None
    batch_dims: BatchDims
    batch: str
    check: str
    on_nonfinite: str
    max_programs: int
    timeout: float


@overload
def optimize(
    model: nn.Module, optimizer: None = None, **settings: Unpack[Settings]
) -> nn.Module: ...
@overload
def optimize(
    model: nn.Module, optimizer: Optimizer, **settings: Unpack[Settings]
) -> tuple[nn.Module, Optimizer]: ...
def optimize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    devices: int | None = None,
    loss_fn: LossFn | None = None,
    init_fn: Callable[[], nn.Module] | None = None,
    example_batch: Any = None,
    plan: str | Path | Plan | None = None,
    cluster: Cluster | None = None,
    clip_norm: float | None = None,
    batch_dims: BatchDims = None,
    batch: str = "global",
    check: str = "first-step",
    on_nonfinite: str = "ignore",
    max_programs: int = MAX_PROGRAMS,
    timeout: float = 600.0,
    **pins: Unpack[PinArguments],
) -> Any:
    """Choose a parallel plan for `model` on `devices`; the model then trains under it, in place.

    Calling it runs the planned step, `loss.backward()` hands out the gradients (docs/training.md).

    optimizer: returned as the same object; its groups, schedulers and hooks stay valid.
    devices: how many ranks. Default: the launcher's world size; else the script is started again.
    loss_fn: `loss_fn(output, target)`, where the model returns no loss; "outside": the script's.
    init_fn: makes a model on the meta device again; each rank initialises only what it holds.
    example_batch: a batch to plan for immediately. Default: the first training batch.
    plan: run exactly this plan (a Plan, or a file saved by `graphaccel plan --json`).
    cluster: the hardware to plan for. Default: the machine that this process runs on.
    clip_norm: the largest global norm of the gradients, to which `optimizer.step()` clips them.
    batch_dims: the batch dim: one for all inputs, or by name or position; None: the input has none.
    batch: "global": all ranks pass the same batch. "local": each passes rows of its own.
    check: "first-step": the graph's loss and gradients must equal eager's. "off": no comparison.
    on_nonfinite: of a loss that is NaN or infinite: "ignore", "skip" the update, "error" (GA416).
    max_programs: how many compiled programs are kept, one for each shape of batches.
    timeout: seconds after which a rank that does not answer counts as lost.
    pins: decisions to fix (docs/pins.md); options of `graphaccel run` take precedence.

    Raises a subclass of GraphAccelError; the model and the optimizer are then unchanged.
    """
    hooked()
    decided = asked_pins(model, plan, pins)
    check = check_run(check, on_nonfinite, max_programs, batch)
    check_arguments(model, optimizer, decided, loss_fn, clip_norm)
    check_settings(cluster, timeout, example_batch, batch_dims)
    refuse_on(model)
    check_supported(model)
    if os.environ.get(PLAN_ONLY) == "1":
        job = (loss_fn, decided, example_batch, batch_dims, batch)
        return _plan_only(PlanRequested(model, optimizer, *job))
    given = runnable_plan(plan, decided)
    count, device = start_ranks(devices, given, cluster, timeout)
    where = cluster or cluster_here(count, device)
    decided = here(decided, device, where) if given is None else decided
    what = (model, loss_fn, optimizer, batch_dims)
    compiler = _compiler(*what, where, decided, given, plan_path(plan))
    run = RunSettings(count, device, timeout, clip_norm, check, on_nonfinite, max_programs, batch)
    _attach(Run.of(model, optimizer, compiler, run), initial_values(model, init_fn), example_batch)
    return model if optimizer is None else (model, optimizer)


def _compiler(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: Optimizer | None,
    batch_dims: BatchDims,
    cluster: Cluster,
    pins: Mapping[str, Any],
    given: Plan | None = None,
    path: str = "plan",
) -> Compiler:
    """What plans a model and compiles it, under the given plan where there is one."""
    kind, shardable = cluster.device.type, is_elementwise(optimizer)
    what = model_of(model, loss_fn, optimizer, kind, shardable=shardable, batch_dims=batch_dims)
    if given is None:
        pins = keeping_parameters_whole(optimizer, pins, cluster.count)
    return Compiler(what, cluster, pins, given, path)


def _attach(run: Run, initial: InitTape | None, example_batch: Any) -> None:
    """Make the model run under a plan: prepared now where there is an example batch, else at the
    first training batch."""
    handle, device = Handle(run, initial), run.settings.device

    def same_weights() -> None:
        same_on_all_ranks(run.model, run.settings.devices, initial, device)

    with on_device(run.model, device):
        if example_batch is None:
            same_weights()
        else:
            handle.prepare(as_batch(example_batch), same_weights)
    attach(run.model, handle, handle.run, handle.state_dict, handle.has_all, handle.generating)
    handle.watch_steps()
    hooked().explain_memory(handle, device)


def plan(
    model: nn.Module,
    example_batch: Any,
    *,
    devices: int,
    device: str = "cpu",
    memory: int | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    cluster: Cluster | None = None,
    batch_dims: BatchDims = None,
    **pins: Unpack[PinArguments],
) -> Plan:
    """Choose a plan without running anything; the devices need not exist.

    device: a device name from the catalogue
    (`graphaccel.planner.cluster.catalogue.device_names()`).
    memory: bytes of memory per device. Default: the catalogue's.
    loss_fn, batch_dims: as for `optimize`.

    Raises InfeasiblePlan (GA201), which says what would make a plan fit.
    """
    where = _hardware(devices, device, memory, cluster)
    compiler = _planner(model, example_batch, where, loss_fn, optimizer, batch_dims, pins)
    return compiler.choose(as_batch(example_batch)).plan


def fits(
    model: nn.Module,
    example_batch: Any,
    *,
    devices: int,
    device: str = "cpu",
    memory: int | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    cluster: Cluster | None = None,
    batch_dims: BatchDims = None,
    **pins: Unpack[PinArguments],
) -> Fit:
    """Whether a training step fits `devices`, which need not exist: the chosen plan, and the bytes
    that the fullest device needs at least, probably and at most. True as a condition where a plan
    is safe. Arguments, and errors but InfeasiblePlan (GA201): as for `plan`."""
    where = _hardware(devices, device, memory, cluster)
    compiler = _planner(model, example_batch, where, loss_fn, optimizer, batch_dims, pins)
    return fit_of(compiler, as_batch(example_batch))


def fewest_devices(
    model: nn.Module,
    example_batch: Any,
    *,
    most: int,
    device: str = "cpu",
    memory: int | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    batch_dims: BatchDims = None,
    **pins: Unpack[PinArguments],
) -> int | None:
    """The fewest devices on which a plan is safe, of 1, 2, 4, ... up to `most`; None for none.
    Other arguments, and errors but InfeasiblePlan (GA201): as for `plan`."""
    where = _hardware(most, device, memory, None)
    compiler = _planner(model, example_batch, where, loss_fn, optimizer, batch_dims, pins)
    batch = as_batch(example_batch)
    return fewest(compiler, batch, most, lambda n: _hardware(n, device, memory, None))


def largest_batch(
    model: nn.Module,
    example_batch: Any,
    *,
    devices: int,
    device: str = "cpu",
    memory: int | None = None,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    cluster: Cluster | None = None,
    batch_dims: BatchDims = None,
    **pins: Unpack[PinArguments],
) -> int | None:
    """The largest global batch with a safe plan, a multiple of `devices`, to within 1/16; None
    where one row for each device is too many. Without pinned `microbatches` there is one: a batch
    that is cut into more of them has no limit. Other arguments, and errors: as for `plan`."""
    where = _hardware(devices, device, memory, cluster)
    compiler = _planner(model, example_batch, where, loss_fn, optimizer, batch_dims, pins)
    return largest(compiler, as_batch(example_batch))


def _hardware(devices: int, device: str, memory: int | None, cluster: Cluster | None) -> Cluster:
    check_whole(devices)
    return cluster or named_cluster(str(device), devices, memory)


def _planner(
    model: nn.Module,
    example_batch: Any,
    cluster: Cluster,
    loss_fn: LossFn | None,
    optimizer: Optimizer | None,
    batch_dims: BatchDims,
    pins: PinArguments,
) -> Compiler:
    """What plans a model without running it."""
    decided = with_checkpointing(model, pins)
    check_job(model, optimizer, decided, loss_fn)
    check_settings(cluster, 1, example_batch, batch_dims)
    check_supported(model)
    return _compiler(model, loss_fn, optimizer, batch_dims, cluster, decided)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer in full, on the CPU, loadable into the plain model.

    model: the optimized model, a copy of it, a module that contains one (`AveragedModel`), or one
      that has its weights, as after `merge_and_unload()` of peft.

    Collective: all ranks call it, and all get the result. Raises GraphMisuse (GA407) if `model` is
    not a model.
    """
    if not isinstance(model, nn.Module):
        raise GraphMisuse(what=f"the model is a torch.nn.Module, not {type(model).__name__}")
    whole: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        handle = getattr(type(module), "graphaccel", None)
        if isinstance(handle, Handle):
            parts = handle.full_state(module)
            whole |= {f"{prefix}.{key}" if prefix else key: part for key, part in parts.items()}
    state = whole if isinstance(getattr(model, "graphaccel", None), Handle) else model.state_dict()
    return {key: whole[key] if key in whole else whole_value(value) for key, value in state.items()}


def start_ranks(
    devices: int | None = None,
    given: Plan | None = None,
    cluster: Cluster | None = None,
    timeout: float = 600.0,
) -> tuple[int, torch.device]:
    """Make this process one of the ranks: restart the script under a launcher where it needs one.

    devices, given, cluster: what says how many ranks there are; without any, the launcher does.
    Returns the number of ranks, and the device that this rank computes on.

    Raises TooManyDevices (GA205), NeedsLauncher (GA403), GraphMisuse (GA407), NotAlone (GA409) or
    NoMeeting (GA419).
    """
    if devices != 1 and not dist.is_initialized():
        join_job(restarts=devices is not None or given is not None)
    count = device_count(devices, given, cluster)
    ensure_launched(count, dist.get_world_size() if dist.is_initialized() else None)
    return count, _start(count, timeout)


def _start(count: int, timeout: float) -> torch.device:
    """Join the default process group; returns the device this rank computes on."""
    if count > 1:
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if count > 1 and not dist.is_initialized():
        with meeting_by_variables(os.environ, timeout):
            dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
        hooked()  # in front of torch's hook, which names the rank
        atexit.register(_leave)
    return device


def _leave() -> None:
    """Destroy the process group that was initialised here: threads of it that outlive the
    interpreter sometimes end in an abort. Not after an uncaught exception: other ranks may never
    answer, and this would wait for them."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def cluster_here(count: int, device: torch.device) -> Cluster:
    """The hardware of this machine: devices from the catalogue, memory as the driver reports it."""
    if device.type == "cpu":
        return named_cluster("cpu", count)
    properties = torch.cuda.get_device_properties(device)
    gpu = DetectedDevice(
        properties.name,
        properties.total_memory,
        properties.multi_processor_count,
        (properties.major, properties.minor),
    )
    result = detected_cluster(gpu, count)
    host = host_memory() // torch.cuda.device_count()
    assert result.host is not None
    return replace(result, host=replace(result.host, memory=host))


class PlanRequested(BaseException):
    """Ends a script that `graphaccel plan script.py` runs, and carries what it would have trained.

    A BaseException, so that a script that catches Exception does not go on to train.
    example: the batch given to `optimize`, or the flattened arguments of the first model call.
    local: whether it is what one rank gives.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: LossFn | None,
        pins: Mapping[str, Any],
        example: Any,
        batch_dims: BatchDims = None,
        batch: str = GLOBAL,
    ) -> None:
        super().__init__("planning ends this script here")
        self.batch_dims, self.local = batch_dims, batch == LOCAL
        self.model, self.optimizer = model, optimizer
        self.loss_fn: LossFn = loss_fn
        self.pins, self.example = pins, example


def _plan_only(request: PlanRequested) -> Any:
    """Raise the request now, or without an example batch when the first training batch comes."""
    if request.example is not None:
        raise request

    def run(
        module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if module.training and torch.is_grad_enabled():
            request.example = flatten_call(args, kwargs)
            raise request
        if not callable(request.loss_fn):
            return forward(module, *args, **kwargs)
        args, kwargs, targets = split_targets(request.loss_fn, args, kwargs)
        return request.loss_fn(forward(module, *args, **kwargs), *targets)

    attach(request.model, None, run)
    return request.model if request.optimizer is None else (request.model, request.optimizer)
