"""The public functions; `optimize` reads top to bottom as capture → planner → passes → runtime."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from graphaccel.arguments import (
    check_arguments,
    check_can_run,
    check_job,
    check_of,
    check_settings,
    check_whole,
    device_count,
    read_plan,
    with_checkpointing,
    with_command_line,
)
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.batch_dims import BatchDims, check_batch_dims
from graphaccel.capture.export import LossFn, split_targets
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import as_batch, check_supported, model_of, tensor_bytes
from graphaccel.errors import GraphMisuse
from graphaccel.optimized_model import Handle
from graphaccel.planner.cluster.catalogue import cluster as named_cluster
from graphaccel.planner.cluster.catalogue import host_memory
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.cluster.detect import Found, cluster_found
from graphaccel.planner.plan.pin_types import PinArguments
from graphaccel.planner.plan.plan import Plan
from graphaccel.runtime.broadcast import same_on_all_ranks
from graphaccel.runtime.deferred import initial_values
from graphaccel.runtime.environment import join_job
from graphaccel.runtime.launch import check_devices, ensure_launched
from graphaccel.runtime.module import attach
from graphaccel.runtime.parameters.sharded_optimizer import is_elementwise
from graphaccel.runtime.wrappers import refuse_on

PLAN_ONLY = "GRAPHACCEL_PLAN_ONLY"
"""Set to 1 by `graphaccel plan script.py` around the script: optimize() raises PlanRequested."""

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
    check: str
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
    check: str = "first-step",
    timeout: float = 600.0,
    **pins: Unpack[PinArguments],
) -> Any:
    """Run `model` under a plan chosen for `devices`; the same object comes back.

    The batch a script passes is the global batch, and every rank passes the same one. In training,
    `model(batch)` runs the whole planned step and `loss.backward()` hands out the gradients.

    optimizer: returned as it is; its parameter groups, schedulers and hooks stay valid.
    devices: the world size under a launcher; otherwise the script is restarted under one.
    loss_fn: `loss_fn(output, target)` if the model does not compute its loss; the model is then
      called with the target as its last argument (or under the parameter's name) and returns the
      loss. Without it the script computes the loss from the outputs: no pipeline cut is possible
      then. "outside" says so where the model returns something that looks like a loss.
    init_fn: builds the model anew, for one on the meta device: every rank then initialises what it
      holds, with the values of one device (`deferred` says so beforehand; Hugging Face's models
      need neither).
    example_batch: plan now; otherwise the first training batch is captured.
    plan: run exactly this plan (an object, or a file saved by `graphaccel plan --json`).
    cluster: what to plan for, where it is not the machine found here.
    clip_norm: `optimizer.step()` clips the gradients of its parameters by their global norm, as
      clip_grad_norm_ before it would; `model.graphaccel.grad_norm` is the norm.
    batch_dims: the dim of the examples in the inputs, where it is not found: one for all, or by an
      input's name or position, as in `{"tokens": 1, 0: 1, "mask": None}` (None: it has none).
    check: "first-step": before anything is changed, loss and gradients of the captured graph are
      compared with plain autograd of the model on a few rows of the first batch, and what differs
      is an error. "off": they are not.
    timeout: seconds after which a rank that does not answer is given up.
    pins: data, pipeline, microbatches, recompute, ... (docs/pins.md); the rest is planned.
      What the command line of `graphaccel run` says comes first.

    Raises a subclass of GraphAccelError; the model and the optimizer are then as they were.
    """
    decided = with_command_line(pins)
    check = check_of(check)
    if plan is None:
        decided = with_checkpointing(model, decided)
    check_arguments(model, optimizer, decided, loss_fn, clip_norm)
    check_settings(cluster, timeout, example_batch)
    check_batch_dims(batch_dims)
    planning = os.environ.get(PLAN_ONLY) == "1"
    refuse_on(model)
    check_supported(model)
    if planning:
        return _plan_only(
            PlanRequested(model, optimizer, loss_fn, decided, example_batch, batch_dims)
        )
    given = read_plan(plan, decided)
    check_can_run(given, decided)
    if devices != 1 and not dist.is_initialized():
        join_job(restarts=devices is not None or given is not None)
    count = device_count(devices, given, cluster)
    ensure_launched(count, dist.get_world_size() if dist.is_initialized() else None)
    device = _start(count, timeout)
    where = cluster or cluster_here(count, device)
    kind, shardable = where.device.type, is_elementwise(optimizer)
    what = model_of(model, loss_fn, optimizer, kind, shardable=shardable, batch_dims=batch_dims)
    compiler = Compiler(what, where, decided, given)
    if isinstance(plan, (str, Path)):
        compiler.path = str(plan)
    initial = initial_values(model, init_fn)
    handle = Handle(model, optimizer, compiler, count, device, timeout, initial, clip_norm, check)
    with _moved(model, device):
        if example_batch is None:
            same_on_all_ranks(model, count, initial, device)
        else:
            handle.prepare(
                as_batch(example_batch), lambda: same_on_all_ranks(model, count, initial, device)
            )
    attach(model, handle, handle.run, handle.state_dict, handle.has_all)
    return model if optimizer is None else (model, optimizer)


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
    """Choose a plan without running anything; devices need not exist.

    device: a name from the catalogue (`graphaccel.planner.cluster.catalogue.device_names()`).
    memory: bytes of one device, where it differs. batch_dims: as for `optimize`.

    Raises InfeasiblePlan (GA201) with what would make it fit.
    """
    check_whole(devices)
    decided = with_checkpointing(model, pins)
    check_job(model, optimizer, decided, loss_fn)
    check_settings(cluster, 1, example_batch)
    check_batch_dims(batch_dims)
    where = cluster or named_cluster(str(device), devices, memory)
    check_supported(model)
    what = model_of(model, loss_fn, optimizer, where.device.type, batch_dims=batch_dims)
    compiler = Compiler(what, where, decided)
    return compiler.choose(as_batch(example_batch))[1]


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Every parameter and buffer in full, on the CPU, loadable into the plain model.

    model: the optimized model, a copy of it, or a module that contains one (`AveragedModel`).

    Collective: all ranks call it, and all get it. Raises GraphMisuse (GA407) for what is no model.
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
    return {
        key: whole[key] if key in whole else value.detach().cpu().clone()
        for key, value in state.items()
    }


def _start(count: int, timeout: float) -> torch.device:
    """Join the process group; the device this rank computes on."""
    if count > 1:
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", count)))
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if count > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
        atexit.register(_leave)
    return device


def _leave() -> None:
    """Leave the process group that was joined here: its threads must not outlive the interpreter,
    which now and then ends in an abort. After an uncaught exception others may never answer, and
    leaving could wait for them."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def cluster_here(count: int, device: torch.device) -> Cluster:
    """The machine found here, as the catalogue knows it; its memory as the driver tells it."""
    if device.type == "cpu":
        return named_cluster("cpu", count)
    properties = torch.cuda.get_device_properties(device)
    gpu = Found(
        properties.name,
        properties.total_memory,
        properties.multi_processor_count,
        (properties.major, properties.minor),
    )
    found = cluster_found(gpu, count)
    host = host_memory() // torch.cuda.device_count()
    assert found.host is not None
    return replace(found, host=replace(found.host, memory=host))


@contextmanager
def _moved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on this rank's device, and back where it was if the block fails.

    There is nothing to move on meta. What would leave no room there for its gradients is not moved
    whole: each tensor is, to where the plan has it (`runtime.session`).
    """
    before = next(model.parameters()).device
    moves = device.type != "cpu" and before.type != "meta"
    if moves and before.type == "cpu":
        size = sum(map(tensor_bytes, (*model.parameters(), *model.buffers())))
        moves = 2 * size <= torch.cuda.mem_get_info(device)[0]
    if moves:
        model.to(device)
    try:
        yield
    except BaseException:
        if moves:
            model.to(before)
        raise


class PlanRequested(BaseException):
    """Ends a script that `graphaccel plan script.py` runs, with what it would have trained.

    A BaseException: a script that catches Exception must not train after all.
    example: the batch of `optimize`, or a flattened first call of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: LossFn | None,
        pins: Mapping[str, Any],
        example: Any,
        batch_dims: BatchDims = None,
    ) -> None:
        super().__init__("planning ends this script here")
        self.batch_dims = batch_dims
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.pins, self.example = pins, example


def _plan_only(request: PlanRequested) -> Any:
    """Raise the request; without an example batch, from the first training batch."""
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
