"""Parameters whose first update is compared: one of each kind, with gradient and state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.all_gradients import AllGradients
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.parameters.sharded_optimizer import local_part

_LARGEST = {True: 2**18, False: 2**24}
"""Elements of a parameter that is gathered for an optimizer of shards; of all that are for one of
whole parameters, for whose step all are gathered."""
_PART = 2**12
"""Elements of the part of a shard that is compared where its parameter is larger."""
_MOST = 16
_BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-3}
_NARROW = 3e-2
"""How far an update may be off, relative to the largest one of its parameter: the numbers that it
is made of are the same, in other places of a vector (`proof.planned` has the same bounds)."""
_UNITS = 4
"""Units of rounding of the largest weight, beside that."""

_Part = tuple[slice, ...]


@dataclass(frozen=True)
class Updated:
    """What a step is compared for.

    names: of parameters, by identity. layouts: of optimizer state, by identity of its parameter.
    elementwise: whether the optimizer steps shards, not gathered tensors. declared: because the
    script says so. clipping: what clips gradients within the step, if anything does. on_host:
    whether the optimizer steps copies on the host.
    """

    mesh: Mesh
    names: Mapping[int, str]
    layouts: Mapping[int, ShardLayout] = field(repr=False)
    elementwise: bool
    declared: bool
    clipping: AllGradients | None
    on_host: bool


@dataclass(frozen=True)
class Sample:
    """A parameter, and what a copy of the optimizer steps in its place.

    part: which part of this rank's shard it is; None for all of the parameter. start: its
    numbers before the step. state: before the step. expected: state behind it.
    """

    name: str
    parameter: nn.Parameter
    layout: ShardLayout | None
    group: dict[str, Any]
    part: _Part | None
    whole: nn.Parameter
    start: Tensor
    state: dict[str, Any]
    expected: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """One tensor. name: of its parameter. error: of the update, relative to the largest. moved:
    whether a parameter's update shows beside rounding. wrong: a sentence where it differs."""

    name: str
    error: float = 0.0
    moved: bool = False
    wrong: str = ""


def chosen(optimizer: torch.optim.Optimizer, updated: Updated) -> list[Sample]:
    """The smallest parameter with a gradient of each kind, in the order of the groups. Ranks that
    share a parameter choose alike, and gather it. A collective."""
    kinds: dict[Any, tuple[nn.Parameter, dict[str, Any]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            layout = updated.layouts.get(id(parameter))
            if isinstance(parameter, RemoteTensor) or not _is_dense(parameter):
                continue
            splits, padded = (layout.splits, layout.padded) if layout is not None else ((), False)
            kept = isinstance(parameter, ShardTensor), isinstance(parameter.grad, ShardTensor)
            single = parameter.numel() == 1
            key = number, parameter.dim(), parameter.dtype, splits, padded, kept, single
            known = kinds.get(key)
            if known is None or parameter.numel() < known[0].numel():
                kinds[key] = parameter, group
    some = sorted(kinds.values(), key=lambda one: one[0].numel())[:_MOST]
    if not updated.elementwise:  # each is held whole, with gradient and state
        sizes = accumulate(parameter.numel() for parameter, _ in some)
        some = [one for one, size in zip(some, sizes, strict=True) if size <= _LARGEST[False]]
    return [_sample(optimizer, p, group, updated) for p, group in some]


def _is_dense(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    dense = gradient is not None and gradient.layout == torch.strided and parameter.numel() > 0
    return dense and parameter.is_floating_point()


@torch.no_grad()
def _sample(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    group: dict[str, Any],
    updated: Updated,
) -> Sample:
    layout, gradient = updated.layouts.get(id(parameter)), parameter.grad
    assert gradient is not None
    part = None
    if updated.elementwise and parameter.numel() > _LARGEST[True]:
        part = _first_part(parameter if layout is None else layout.local_shape)
    place = torch.device("cpu") if updated.on_host else parameter.device

    def taken(tensor: Tensor) -> Tensor:
        if part is not None:
            local = local_part(tensor, layout) if layout is not None else tensor
            return local[part].detach().clone().to(place)
        whole = tensor.whole() if isinstance(tensor, ShardTensor) else tensor.detach()
        return whole.clone(memory_format=torch.contiguous_format).to(place)

    state = {
        key: _state(value, layout, part, place)
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    start = taken(parameter)
    with torch.enable_grad():
        whole = nn.Parameter(start.clone(), requires_grad=parameter.requires_grad)
    whole.grad = taken(gradient)
    name = updated.names.get(id(parameter), "a parameter")
    return Sample(name, parameter, layout, group, part, whole, start, state)


def _first_part(shape: torch.Size | Tensor) -> _Part:
    sizes = shape.shape if isinstance(shape, Tensor) else shape
    side = max(1, round(_PART ** (1 / len(sizes))))
    return tuple(slice(0, side) for _ in sizes)


def _state(value: Any, layout: ShardLayout | None, part: _Part | None, place: torch.device) -> Any:
    """State that belongs to a sample: a shard's as the whole parameter's."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if isinstance(value, ShardTensor):
        value, layout = (value.whole(), None) if part is None else (value.local, layout)
    if part is not None:
        shape = value.shape if layout is None else layout.local_shape
        return value[part].clone() if value.dim() and value.shape == shape else value.clone()
    if layout is not None and layout.splits and value.dim() and value.shape == layout.local_shape:
        with answered("all parts of the optimizer's state"):
            return layout.gather(value).to(value.device)
    return value.clone()


@torch.no_grad()
def compared(sample: Sample, optimizer: torch.optim.Optimizer) -> Iterator[Compared]:
    """The new values on this rank beside those of the copy."""
    parameter, whole = sample.parameter, sample.whole.detach()
    values = _pair(sample, parameter.detach(), whole)
    yield _beside(sample, "the new value", *values, weights=True)
    state = optimizer.state.get(parameter, {})
    for key, value in sample.expected.items():
        described = f"the new state {key!r}"
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if not isinstance(state.get(key), Tensor):
            yield Compared(sample.name, wrong=f"{described} of `{sample.name}` is missing")
            continue
        pair = _pair(sample, state[key], value)[:2]
        # Of a tensor class of its own (torchao's 8 bits): the numbers that it stands for.
        actual, expected = (t if _is_plain(t) else t.dequantize() for t in pair)
        yield _beside(sample, described, actual, expected, torch.zeros_like(expected))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _pair(sample: Sample, actual: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank holds of a tensor, what it has to be, and what the parameter was."""
    layout, start = sample.layout, sample.start
    if sample.part is not None:
        if layout is not None and actual.shape == layout.shape:
            actual = local_part(actual, layout)
        return (actual[sample.part] if actual.dim() == len(sample.part) else actual), whole, start
    if isinstance(actual, ShardTensor):
        layout, actual = actual.sharding, actual.local
    elif layout is None or actual.shape != layout.local_shape or actual.shape == whole.shape:
        return actual, whole, start
    start = layout.here(start) if start.shape == layout.shape else start
    return layout.real(actual), layout.here(whole), start


def _beside(
    sample: Sample,
    what: str,
    actual: Tensor,
    expected: Tensor,
    start: Tensor,
    *,
    weights: bool = False,
) -> Compared:
    """One tensor of a sample. start: before the step. weights: it is the parameter."""
    if actual.shape != expected.shape:
        shapes = f"{list(actual.shape)} for {list(expected.shape)}"
        return Compared(sample.name, wrong=f"{what} of `{sample.name}` has another shape: {shapes}")
    kind = max((actual.dtype, sample.start.dtype), key=lambda d: torch.finfo(d).eps)
    actual, expected, start = (t.to("cpu", torch.float64) for t in (actual, expected, start))
    if not bool(expected.isfinite().all()) or not expected.numel():
        return Compared(sample.name)  # as gradients that are not finite make it
    change = (expected - start).abs().max().item()
    apart = (actual - expected).abs().max().item()
    unit = torch.finfo(kind).eps * max(start.abs().max().item(), expected.abs().max().item())
    allowed = _BOUNDS.get(kind, _NARROW) * change + _UNITS * unit
    error = apart / change if change else float(apart > 0)
    wrong = "" if apart <= allowed else f"{what} of `{sample.name}` is off by {error:.1e}"
    return Compared(sample.name, error, weights and change > 2 * allowed, wrong)
