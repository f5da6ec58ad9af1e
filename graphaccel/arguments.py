"""Checks the arguments of `optimize` before anything is started or changed."""

from __future__ import annotations

import inspect
import json
import math
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from graphaccel.capture.batch_dims import check_batch_dims
from graphaccel.capture.export.export import OUTSIDE
from graphaccel.compat.torch.modules import is_compiled
from graphaccel.compat.torch.optimizers import is_initialised
from graphaccel.compiler.model import check_parameters
from graphaccel.errors import BadPin, GraphMisuse, HookNotKept
from graphaccel.errors.messages import Location
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.pins import NAMES
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.validate_plan import check_given, misread
from graphaccel.runtime.loss_guard import ON_NONFINITE
from graphaccel.runtime.module import original_class
from graphaccel.runtime.parameters.module_hooks import hooks_on
from graphaccel.runtime.wrappers import refuse_on

_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")

PINS = "GRAPHACCEL_PINS"
"""Environment variable: pins from the command line of `graphaccel run`, as JSON."""


FIRST_STEP = "first-step"
CHECKS = (FIRST_STEP, "off")
MAX_PROGRAMS = 64
GLOBAL, LOCAL = "global", "local"
BATCHES = (GLOBAL, LOCAL)
"""What each rank passes: the global batch, or its own rows of it."""
CHECK = "GRAPHACCEL_CHECK"
"""Environment variable: `--check` of `graphaccel run`."""


def check_run(check: str, on_nonfinite: Any, max_programs: Any, batch: Any) -> str:
    """Which check to run: the command line's, else the script's.

    Raises BadPin (GA202) for a check, a policy (`on_nonfinite`) or a kind of batch that does not
    exist, GraphMisuse (GA407) if `max_programs` is not a whole number above 0.
    """
    check = os.environ.get(CHECK) or check
    if check not in CHECKS:
        raise BadPin(pin="check", value=check, reason="there is no such check", allowed=CHECKS)
    if on_nonfinite not in ON_NONFINITE:
        reason = "there is no such policy"
        raise BadPin(pin="on_nonfinite", value=on_nonfinite, reason=reason, allowed=ON_NONFINITE)
    _check_max_programs(max_programs)
    if batch not in BATCHES:
        reason = "each rank passes the global batch, or its own rows"
        raise BadPin(pin="batch", value=batch, reason=reason, allowed=BATCHES)
    return check


def asked_pins(model: Any, plan: Any, pins: Mapping[str, Any]) -> dict[str, Any]:
    """The script's pins, overridden by those of `graphaccel run`, and, where no plan is given, with
    recomputation where the model asks for it."""
    given = json.loads(os.environ.get(PINS, "{}"))
    asked = {**pins, **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}}
    return with_checkpointing(model, asked) if plan is None else asked


def with_checkpointing(model: Any, pins: Mapping[str, Any]) -> dict[str, Any]:
    """The pins, with recompute="all" where the model has gradient checkpointing enabled
    (`gradient_checkpointing_enable()` of Hugging Face, `set_grad_checkpointing()` of timm)."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    checkpointing = any(getattr(m, name, False) is True for m in modules for name in _CHECKPOINTING)
    return {"recompute": "all", **pins} if checkpointing else dict(pins)


def check_arguments(
    model: Any,
    optimizer: Any,
    pins: Mapping[str, Any],
    loss_fn: Any = None,
    clip_norm: float | None = None,
) -> None:
    """Raises BadPin (GA202), GraphMisuse (GA407), HookNotKept (GA401) or Unsupported (GA208)."""
    check_job(model, optimizer, pins, loss_fn)
    if original_class(model) is not type(model):
        raise GraphMisuse(
            what="this model already runs under a plan", help_line="call optimize() once"
        )
    if is_compiled(model):
        raise GraphMisuse(
            what="the model is compiled by torch.compile, which would run instead of a plan",
            help_line="graphaccel.optimize(model, optimizer, compile='inductor')  # of the model "
            "before torch.compile",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise GraphMisuse(
            what=f"the model is wrapped in {type(model).__name__}, which a plan replaces",
            help_line="graphaccel.optimize(model.module, optimizer)",
        )
    check_hooks(model.named_modules())
    if clip_norm is not None:
        _check_clip_norm(clip_norm, optimizer)


def check_job(model: Any, optimizer: Any, pins: Mapping[str, Any], loss_fn: Any = None) -> None:
    """Check the arguments that running and planning have in common.

    Raises BadPin (GA202), GraphMisuse (GA407) or Unsupported (GA208).
    """
    unknown = sorted(set(pins) - set(NAMES))
    if unknown:
        raise BadPin(
            pin=unknown[0],
            value=pins[unknown[0]],
            reason=f"no such decision; there are: {', '.join(NAMES)}",
        )
    if inspect.isclass(loss_fn) or (
        loss_fn is not None and loss_fn != OUTSIDE and not callable(loss_fn)
    ):
        raise GraphMisuse(
            what="loss_fn is a function of the model's output and the targets, not "
            f"{_shown(loss_fn)}",
            help_line='loss_fn=torch.nn.functional.cross_entropy, or "outside" if the script '
            "computes the loss",
        )
    if not isinstance(model, nn.Module):
        named = f"the class {model.__name__}" if inspect.isclass(model) else type(model).__name__
        raise GraphMisuse(
            what=f"the model is a torch.nn.Module, not {named}",
            help_line=f"graphaccel.optimize({model.__name__}(...), optimizer)"
            if inspect.isclass(model)
            else "",
        )
    check_parameters(model)
    if optimizer is not None:
        _check_optimizer(model, optimizer)


def _shown(value: Any) -> str:
    """A wrong argument in a few words, however large it is."""
    short = reprlib.Repr()
    short.maxother = short.maxstring = 60
    return " ".join(short.repr(value).split())


def check_settings(cluster: Any, timeout: Any, example_batch: Any, batch_dims: Any) -> None:
    """Raises GraphMisuse (GA407) for an argument of the wrong type."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise GraphMisuse(
            what=f"cluster is a graphaccel.planner.cluster.cluster.Cluster, not {_shown(cluster)}",
            help_line="cluster=graphaccel.planner.cluster.catalogue.cluster('h100-80gb', count=8)",
        )
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout > 0:
        raise GraphMisuse(
            what=f"timeout is a number of seconds above 0, not {_shown(timeout)}",
            help_line="graphaccel.optimize(model, optimizer, timeout=600)",
        )
    if isinstance(example_batch, (str, bytes, Iterator, DataLoader)):
        raise GraphMisuse(
            what="example_batch is what one call of the model is given, not "
            f"{type(example_batch).__name__}",
            help_line="graphaccel.optimize(model, optimizer, example_batch=next(iter(loader)))",
        )
    check_batch_dims(batch_dims)


def _check_max_programs(most: Any) -> None:
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise GraphMisuse(
            what=f"max_programs is a whole number above 0, not {_shown(most)}",
            help_line=f"graphaccel.optimize(model, optimizer, max_programs={MAX_PROGRAMS})",
        )


def _check_clip_norm(clip_norm: Any, optimizer: Any) -> None:
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if not number or not 0 < clip_norm < math.inf:
        raise GraphMisuse(
            what=f"clip_norm is the largest norm of all gradients, a number above 0, not "
            f"{_shown(clip_norm)}",
            help_line="graphaccel.optimize(model, optimizer, clip_norm=1.0)",
        )
    if optimizer is None:
        raise GraphMisuse(
            what="clip_norm clips in optimizer.step(), and optimize() was given no optimizer",
            help_line="graphaccel.optimize(model, optimizer, clip_norm=1.0)",
        )


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GraphMisuse(
            what=f"the optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}",
            help_line="graphaccel.optimize(model, optimizers[0])  # the others step as they are"
            if isinstance(optimizer, (list, tuple))
            else "graphaccel.optimize(model, torch.optim.AdamW(model.parameters()))",
        )
    if not is_initialised(optimizer):
        kind = type(optimizer).__name__
        raise GraphMisuse(
            what=f"the optimizer's class {kind} does not call Optimizer.__init__, so that its "
            "steps can not be followed",
            help_line="give the optimizer in it, and wrap that afterwards:  model, optimizer = "
            f"graphaccel.optimize(model, optimizer); optimizer = {kind}(optimizer)",
        )
    own = {id(p) for p in nn.Module.parameters(model)}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        refuse_on(model)  # FSDP puts parameters of its own in place of those that the optimizer has
        raise GraphMisuse(
            what="the optimizer holds no parameter of this model",
            help_line="make it from the model:  torch.optim.AdamW(model.parameters())",
        )


def check_hooks(modules: Iterable[tuple[str, nn.Module]], *, returns_loss: bool = False) -> None:
    """Raises HookNotKept (GA401) for hooks on inner modules, and for those of the process on every
    module: they would run at capture only. For those on the model itself: backward hooks, and
    others where a call of the model `returns_loss` of a `loss_fn`."""
    for name, kind, hook in hooks_on(modules):
        if name or name is None or returns_loss or kind.startswith("backward"):
            location = _written_at(hook)
            raise HookNotKept(module=name or "", every=name is None, kind=kind, location=location)


def _written_at(hook: Any) -> Location | None:
    code = getattr(hook, "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else None


def check_can_run(given: Plan | None, pins: Mapping[str, Any]) -> None:
    """Raises BadPin (GA202) for decisions that can be planned but not run."""
    name = pins.get("precision")
    precision = PRECISIONS.get(str(name)) if given is None else given.precision
    if precision is not None and precision.planned_only:
        raise BadPin(
            pin="precision",
            value=name or "fp8",
            reason="matmuls in 8 bits can be planned (`graphaccel plan`), not run yet",
            allowed=tuple(n for n, p in PRECISIONS.items() if not p.planned_only),
        )


def runnable_plan(given: str | Path | Plan | None, pins: Mapping[str, Any]) -> Plan | None:
    """As `read_plan`; raises BadPin (GA202) also for what can be planned but not run."""
    plan = read_plan(given, pins)
    check_can_run(plan, pins)
    return plan


def read_plan(given: str | Path | Plan | None, pins: Mapping[str, Any]) -> Plan | None:
    """The plan to run exactly, read from its file if given as one, checked as far as possible
    without a graph.

    Raises GraphMisuse (GA407) if it is not a plan, BadPin (GA202) for pins given beside a plan and
    for decisions that no plan can contain, BatchNotDivisible (GA206).
    """
    if given is None:
        return None
    if pins:
        name = next(iter(pins))
        raise BadPin(pin=name, value=pins[name], reason="the plan given as plan= decides it")
    path = plan_path(given)
    plan = given if isinstance(given, Plan) else _from_file(path)
    reason = misread(plan)
    if reason is not None:
        raise _unread(path, reason)
    check_given(plan, path)
    return plan


def plan_path(given: str | Path | Plan | None) -> str:
    """How errors call a plan that is given: its file, if it is one."""
    return str(given) if isinstance(given, (str, Path)) else "plan"


def _from_file(path: str) -> Plan:
    try:
        return Plan.from_json(Path(path).read_text())
    except OSError as error:
        reason, cause = error.strerror or str(error), error
    except KeyError as error:
        reason, cause = f"it has no field {error}", error
    except (AttributeError, TypeError) as error:
        reason, cause = "it is no plan", error
    except RecursionError as error:
        reason, cause = "it is nested too deeply", error
    except ValueError as error:
        reason, cause = str(error), error
    raise _unread(path, reason) from cause


def _unread(path: str, reason: str) -> GraphMisuse:
    return GraphMisuse(
        what=f"plan `{path}` can not be read: {reason}",
        help_line=f"make a new one:  graphaccel plan FILE --devices N --json {path}",
    )


def check_whole(asked: Any) -> None:
    """Raises BadPin (GA202) if the number of devices is not an integer."""
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise BadPin(pin="devices", value=asked, reason="it is a count of at least 1")


def check_count(asked: Any) -> None:
    """Raises BadPin (GA202) for a number of devices that is not possible."""
    check_whole(asked)
    if asked < 1:
        raise BadPin(pin="devices", value=asked, reason="it is a count of at least 1")


def device_count(asked: int | None, given: Plan | None, cluster: Cluster | None) -> int:
    """How many devices to run on. Raises BadPin (GA202) for a count that is not possible."""
    if asked is not None:
        check_count(asked)
        count = asked
    elif dist.is_initialized():
        count = dist.get_world_size()
    elif "WORLD_SIZE" in os.environ:
        count = int(os.environ["WORLD_SIZE"])
    else:
        count = given.devices if given is not None else 1
    if cluster is not None and cluster.count != count:
        raise BadPin(
            pin="devices",
            value=count,
            reason=f"the cluster given as cluster= has {cluster.count}",
            allowed=(str(cluster.count),),
        )
    return count
