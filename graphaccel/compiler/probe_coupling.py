"""Determines whether an optimizer's step of one parameter depends on others.

A copy of the user's optimizer steps two small tensors in place of each group's. Where the step of
one changes with the size of the other's gradient, the optimizer couples its parameters (a norm over
all gradients, one estimate for all): it can not work where they are on different devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.runtime.parameters.optimizer_copy import copy_of, inner_optimizer
from graphaccel.runtime.parameters.whole_matrices import StateKeys

Optimizer = torch.optim.Optimizer

_SHAPES = (5, 7, 3, 2, 11), (11, 3, 7, 2, 5)
"""Of the two tensors, cut to the number of dims of the user's parameters."""
_SCALES = (1.0, 1e3, 1e-3)
"""Of a gradient: a bound on a norm over all of them acts for one of these."""
_STEPS = 3
DRAWS = "its step draws random numbers"


@dataclass(frozen=True)
class Coupling:
    """dependent: the step of a parameter depends on another. full: which state has the shape of its
    parameter. unknown: why it could not be determined. draws: because a step draws random numbers,
    which for one parameter are those that follow another one's."""

    dependent: bool = False
    full: StateKeys = frozenset()
    unknown: str = ""
    draws: bool = False


def coupling_of(optimizer: Optimizer) -> Coupling:
    """The coupling of an optimizer's parameters; it and the random state are left as they are."""
    if inner := inner_optimizer(optimizer):  # a copy would step it
        return Coupling(unknown=f"it steps another optimizer, `{inner}`")
    full: set[tuple[int, str]] = set()
    for settings, like in _kinds(optimizer):
        drawn = torch.get_rng_state()
        try:
            dependent = _is_dependent(optimizer, settings, like, full)
        except Exception as error:  # the optimizer may raise anything
            return Coupling(unknown=str(error).split("\n")[0][:120] or type(error).__name__)
        finally:
            draws = not torch.equal(drawn, torch.get_rng_state())
            torch.set_rng_state(drawn)
        if draws:
            return Coupling(unknown=DRAWS, draws=True)
        if dependent:
            return Coupling(dependent=True)
    return Coupling(full=frozenset(full))


def _kinds(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """The settings of each group, with one parameter of each number of dims in it."""
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        for like in {p.dim(): p for p in group["params"]}.values():
            yield settings, like


def _is_dependent(
    optimizer: Optimizer, settings: dict[str, Any], like: nn.Parameter, full: set[tuple[int, str]]
) -> bool:
    """Whether one of two tensors' steps depends on the other's gradient; fills `full`."""
    alone, _ = _stepped(optimizer, settings, like, (1.0, 1.0))
    for scale in _SCALES[1:]:
        if not torch.equal(alone[0], _stepped(optimizer, settings, like, (1.0, scale))[0][0]):
            return True
        if not torch.equal(alone[1], _stepped(optimizer, settings, like, (scale, 1.0))[0][1]):
            return True
    _, built = _stepped(optimizer, settings, like, (1.0, 1.0))
    for parameter, state in built.state.items():
        for key, value in state.items() if isinstance(parameter, Tensor) else ():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
                full.add((like.dim(), key))
    return False


def _stepped(
    optimizer: Optimizer, settings: dict[str, Any], like: nn.Parameter, scales: tuple[float, float]
) -> tuple[list[Tensor], Optimizer]:
    """Two tensors after some steps with gradients of these scales, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        shapes = [shape[: like.dim()] for shape in _SHAPES]
        parameters = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    built = copy_of(optimizer, {**settings, "params": parameters})
    for parameter in parameters:
        kept = {k: v for k, v in optimizer.state.get(like, {}).items() if not torch.is_tensor(v)}
        if kept:
            built.state[parameter].update(kept)
    for _ in range(_STEPS):
        for parameter, scale in zip(parameters, scales, strict=True):
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        built.step()
    return [p.detach() for p in parameters], built
