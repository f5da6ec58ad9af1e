"""One entry under one setting, on one rank: what graphaccel computes beside plain eager mode."""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.coverage import parts
from benchmarks.coverage.entry import Entry, NotMeasured, first_line
from benchmarks.coverage.parts import PARTS, casts_of

SETTINGS: Mapping[str, Mapping[str, int]] = {
    "one": {},
    "data": {"data": 2},
    "microbatches": {"microbatches": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
"""The decisions that each setting pins; all else is planned."""

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Largest difference that is right, relative to the largest value of the tensor."""

FLOOR = 1e-5
"""A gradient this much smaller than the model's largest is compared with that: it is rounding."""

_SEED = 7
_MOVED, _LARGER = (range(4), range(4, 16)), 4  # as `graphaccel.proof.planned`


def ranks_of(setting: str) -> int:
    """Processes that a setting needs."""
    return 2 if setting in ("data", "tensor", "pipeline") else 1


def judge(part: str, name: str, setting: str) -> dict[str, Any]:
    """What became of it on this rank: "outcome", "detail", and the gradients that are held here.

    Outcomes: right, wrong, refused (detail: the code and the first line), raw, random (it ran, but
    draws numbers, of which a split has others), unmeasured.
    """
    started = time.process_time()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = _judged(part, name, setting, torch.float64)
    if PARTS[part].lifted and found["outcome"] in ("unmeasured", "refused", "raw"):
        if _of_dtypes(found.get("why", found["detail"])):
            found = _judged(part, name, setting, torch.float32)
            found["dtype"] = "float32"
    found.pop("why", None)
    return {**found, "seconds": round(time.process_time() - started, 1)}


def _of_dtypes(text: str) -> bool:
    """Whether a failure is about dtypes: of the model's own casts, or too wide for its size."""
    return any(word in text for word in ("float", "Float", "dtype", "without overflow"))


def _judged(part: str, name: str, setting: str, dtype: torch.dtype) -> dict[str, Any]:
    split = setting != "one"
    build = functools.partial(parts.build, part, name, split=split, dtype=dtype)
    try:
        with casts_of(part, dtype):
            entry, ours = build(), build()
            expected = _step(entry, entry.model)
            again = _step(build(), None, seed=_SEED + 1)
    except NotMeasured as reason:
        return {"outcome": "unmeasured", "detail": str(reason)}
    except Exception as error:
        return {"outcome": "unmeasured", "detail": f"eager: {first_line(error)}"}
    draws = _difference(expected, again, _bound(entry.model)) is not None
    try:
        with casts_of(part, dtype, planned=True):
            got = planned_step(ours, part, name, setting, dtype)
    except Exception as error:
        return _failure(error)
    held = sorted(got["grads"])
    every = sorted(expected["grads"])
    if draws and split:
        finite = all(torch.isfinite(g).all() for g in got["grads"].values())
        return {"outcome": "random" if finite else "wrong", "detail": "", "held": held, "of": every}
    wrong = _difference(expected, got, _bound(entry.model))
    if wrong is not None and not draws:
        with casts_of(part, dtype):
            wrong = _beyond_rounding(build, expected, got, wrong)
    outcome = "right" if wrong is None else "wrong"
    return {"outcome": outcome, "detail": wrong or "", "held": held, "of": every}


def _beyond_rounding(
    build: Callable[[], Entry], expected: Mapping[str, Any], got: Mapping[str, Any], wrong: str
) -> str | None:
    """`wrong`, or None where eager mode itself changes as much when each weight is one unit of
    rounding higher, lower or as it is: at most `_LARGER` times the largest of a few such changes,
    of that gradient, or the median over all gradients."""
    changes: dict[str, float] = {}
    distances = _distances(expected, got)
    for seeds in _MOVED:
        for seed in seeds:
            entry, generator = build(), torch.Generator().manual_seed(seed)
            for parameter in entry.model.parameters():
                value = parameter.data
                steps = torch.randint(-1, 2, value.shape, generator=generator).to(value)
                parameter.data = value + steps * value.abs() * torch.finfo(value.dtype).eps
            for name, off in _distances(expected, _step(entry, entry.model)).items():
                changes[name] = max(off, changes.get(name, 0.0))
        usual = statistics.median(changes.values())
        explained = {n: _LARGER * max(changes.get(n, 0.0), usual) for n in distances}
        if all(off <= explained[n] for n, off in distances.items()):
            return None
    return wrong


def _distances(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, float]:
    """Relative distances of the loss ("") and of each gradient that is held."""
    largest = max((_size(g) for g in expected["grads"].values()), default=0.0)
    grads = expected["grads"]
    of_grads = {n: _distance(g, grads[n], FLOOR * largest) for n, g in got["grads"].items()}
    return {"": _distance(got["loss"], expected["loss"], 0.0), **of_grads}


def _failure(error: Exception) -> dict[str, Any]:
    from graphaccel.errors import GraphAccelError

    if isinstance(error, GraphAccelError):
        text = str(error).strip().splitlines()[0].removeprefix(f"error[{error.code}]: ")
        found = {"outcome": "refused", "code": error.code, "detail": text[:200]}
        return found | {"why": str(error)}
    return {"outcome": "raw", "detail": first_line(error)}


def _step(entry: Entry, model: nn.Module | None, seed: int = _SEED) -> dict[str, Any]:
    """Loss, gradients by name and buffers after one forward and backward."""
    model = entry.model if model is None else model
    torch.manual_seed(seed)
    loss = entry(model)
    loss.backward()
    grads = {
        name: _whole(p.grad).detach().clone()
        for name, p in model.named_parameters()
        if type(p).__name__ != "RemoteTensor" and p.grad is not None
    }
    return {"loss": loss.detach().clone(), "grads": grads}


def _whole(value: Tensor) -> Tensor:
    whole = getattr(value, "whole", None)
    return value if whole is None else whole()


def planned_step(
    entry: Entry, part: str, name: str, setting: str, dtype: torch.dtype
) -> dict[str, Any]:
    """As `_step`, of the entry's model under the plan of a setting."""
    import graphaccel

    parameters = [p for p in entry.model.parameters() if p.requires_grad]
    model, _ = graphaccel.optimize(
        entry.model,
        torch.optim.SGD(parameters, lr=0.1),
        devices=ranks_of(setting),
        timeout=60,
        **SETTINGS[setting],
    )
    captures = model.graphaccel.compiler.captures
    split = setting != "one" and not PARTS[part].lifted
    known = _captured(part, name, split, dtype)
    if not _equally_many(len(known)):
        known.clear()
    captures.steps = known
    return _step(entry, model)


def _equally_many(captures: int) -> bool:
    """Whether all ranks have so many: one of them may have run this entry alone before."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, captures)
    return len(set(counts)) == 1


@functools.lru_cache(maxsize=1)
def _captured(part: str, name: str, split: bool, dtype: torch.dtype) -> dict[Any, Any]:
    """Captures of the last entry: all settings with the same batch share them."""
    return {}


def _bound(model: nn.Module) -> float:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((BOUNDS.get(kind, BOUNDS[torch.float32]) for kind in kinds), default=1e-8)


def _difference(expected: Mapping[str, Any], got: Mapping[str, Any], bound: float) -> str | None:
    """What is further off than the bound, or None. Gradients not held here are left out."""
    off = _distance(got["loss"], expected["loss"], 0.0)
    if not off <= bound:
        return f"the loss is off by {off:.1e}"
    more = set(got["grads"]) - set(expected["grads"])
    if more:
        return f"a gradient that eager mode does not have: {min(more)}"
    largest = max((_size(g) for g in expected["grads"].values()), default=0.0)
    for name, grad in got["grads"].items():
        true = expected["grads"][name]
        if grad.shape != true.shape or grad.dtype != true.dtype:
            return f"the gradient of {name} is {grad.dtype} {list(grad.shape)}"
        off = _distance(grad, true, FLOOR * largest)
        if not off <= bound:
            return f"the gradient of {name} is off by {off:.1e}"
    return None


def _size(value: Tensor) -> float:
    finite = value.detach().abs().nan_to_num(0.0, 0.0, 0.0)
    return finite.max().item() if value.numel() else 0.0


def _distance(got: Tensor, true: Tensor, floor: float) -> float:
    """The largest difference, relative; infinities and NaNs must be where eager mode has them."""
    if got.numel() == 0:
        return 0.0
    if not torch.equal(torch.isfinite(got), torch.isfinite(true)):
        return math.inf
    off = _size(got - true)
    scale = max(_size(true), floor)
    return off / scale if scale else off


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One verdict of what the ranks say: the worst of theirs, and every gradient must be held."""
    order = ("raw", "wrong", "refused", "unmeasured", "random", "right")
    worst = min(answers, key=lambda a: order.index(a["outcome"]))
    verdict = {k: worst[k] for k in ("outcome", "code", "detail", "dtype") if worst.get(k)}
    verdict["seconds"] = max(a["seconds"] for a in answers)
    if worst["outcome"] in ("right", "random"):
        lost = set(worst["of"]) - {name for a in answers for name in a["held"]}
        if lost:
            verdict |= {"outcome": "wrong", "detail": f"no rank has the gradient of {min(lost)}"}
    return verdict
