"""Runs an optimizer that reads whole matrices (Muon, Adafactor) where parameters are sharded.

While `optimizer.step()` runs, each parameter whose optimizer state is sharded is replaced in the
optimizer's groups by the full tensor, all-gathered with its gradient and state; every rank computes
the same step. Afterwards each rank keeps its shard of parameter and state. State of other shapes
(sums over rows or columns) is held in full by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphaccel.errors import GraphMisuse, NotElementwise
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.parameters.step_hooks import StepHooks, closure_of

Optimizer = torch.optim.Optimizer

StateKeys = frozenset[tuple[int, str]]
"""State of an optimizer with the shape of its parameter: (number of dims, key)."""


@dataclass(frozen=True)
class _Gathered:
    """A parameter of the user's, and the full tensor that is stepped in its place."""

    parameter: nn.Parameter
    whole: nn.Parameter
    layout: ShardLayout


class WholeMatrixOptimizer:
    """Steps full tensors with one optimizer, whose step of a parameter depends on no other.

    full: which state has the shape of its parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hooks: StepHooks,
        full: StateKeys,
    ) -> None:
        self._layouts: dict[int, ShardLayout] = {}
        self._full = set(full)
        self._gathered: list[_Gathered] = []
        hooks.add(self._before)
        optimizer.register_step_post_hook(self._after)

    def add_layouts(
        self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, ShardLayout]
    ) -> None:
        """Add layouts of optimizer state, by name of the parameter."""
        self._layouts |= {id(parameters[n]): layout for n, layout in layouts.items()}

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._restore(optimizer)  # the previous step may have raised
        if self._layouts and closure_of(args, kwargs) is not None:  # may be called several times
            raise GraphMisuse(
                what="optimizer.step(closure) where optimizer state is sharded",
                help_line="call the closure first, then optimizer.step()",
            )
        for group in optimizer.param_groups:
            group["params"] = [self._whole(p, optimizer) for p in group["params"]]

    def _whole(self, parameter: nn.Parameter, optimizer: Optimizer) -> nn.Parameter:
        layout, gradient = self._layouts.get(id(parameter)), parameter.grad
        if layout is None or not layout.splits or gradient is None:
            return parameter
        whole = nn.Parameter(_full(parameter), requires_grad=parameter.requires_grad)
        whole.grad = _full(gradient)
        self._gathered.append(_Gathered(parameter, whole, layout))
        if parameter in optimizer.state:
            optimizer.state[whole] = {
                key: self._full_state(key, value, layout, optimizer)
                for key, value in optimizer.state.pop(parameter).items()
            }
        return whole

    def _full_state(self, key: str, value: Any, layout: ShardLayout, optimizer: Optimizer) -> Any:
        if not _has_shape(value, layout.local_shape):
            return value
        if (len(layout.shape), key) not in self._full:
            raise self._ambiguous(key, value, optimizer)
        with answered("all parts of the optimizer's state"):
            return layout.gather(value)

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore groups and state to the user's parameters, and the state to shards."""
        known = {id(each.whole): each.parameter for each in self._gathered}
        for group in optimizer.param_groups:
            group["params"] = [known.get(id(p), p) for p in group["params"]]
        gathered, self._gathered = self._gathered, []
        for each in gathered:
            if each.whole in optimizer.state:
                optimizer.state[each.parameter] = {
                    key: self._shard(key, value, each.layout, optimizer)
                    for key, value in optimizer.state.pop(each.whole).items()
                }

    def _shard(self, key: str, value: Any, layout: ShardLayout, optimizer: Optimizer) -> Any:
        if _has_shape(value, layout.shape):
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise NotElementwise(
                    optimizer=type(optimizer).__name__,
                    reason=f"its state {key!r} is of class {type(value).__name__}, which is not "
                    "known to be cut like its parameter",
                )
            self._full.add((len(layout.shape), key))
            return layout.own(value).clone()
        if _has_shape(value, layout.local_shape):
            raise self._ambiguous(key, value, optimizer)
        return value

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        gathered = list(self._gathered)
        self._restore(optimizer)
        for each in gathered:
            held, whole = each.parameter, each.whole.detach()
            if isinstance(held, ShardTensor):
                held.local.copy_(held.sharding.own(whole))
            elif whole.data_ptr() != held.data_ptr():
                held.detach().copy_(whole)  # its memory was replaced
            each.whole.grad = None

    def _ambiguous(self, key: str, value: torch.Tensor, optimizer: Optimizer) -> NotElementwise:
        return NotElementwise(
            optimizer=type(optimizer).__name__,
            reason=f"its state {key!r} of shape {list(value.shape)} is whole, and has the shape of "
            "a shard of its parameter: the two could not be told apart in a checkpoint",
        )


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, which a rank holds or gathers. Collective where it is sharded."""
    return tensor.whole() if isinstance(tensor, ShardTensor) else tensor.detach()


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == shape
