"""Gives a parameter object another content, which no graph from before the plan may hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphaccel.errors import GraphMisuse


def forget_graphs(model: nn.Module) -> None:
    """Let go of the graphs of weights that torch computes before each forward, and keeps in an
    attribute: those of `torch.nn.utils.weight_norm`, `spectral_norm` and `prune`. They hold the
    parameters."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = str(getattr(hook, "name", getattr(hook, "_tensor_name", "")))
            value = vars(module).get(name)
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(module)[name] = value.detach()


def swap(
    parameter: nn.Parameter,
    other: nn.Parameter,
    gradient_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Swap what two parameters hold. gradient_of: what a gradient that is there already holds then,
    too; the script may have that tensor in a list.

    Raises GraphMisuse (GA407) where a graph holds the parameter.
    """
    gradient = parameter.grad
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        if "use_count" not in str(error):
            raise
        raise GraphMisuse(
            what=f"a parameter of the shape {list(parameter.shape)} is part of an autograd graph "
            "from before the plan",
            help_line="let go of it before the first step, and keep its value:  loss = loss.item()",
        ) from error
    if gradient is not None and gradient_of is not None:
        other.grad = None
        torch.utils.swap_tensors(gradient, gradient_of(gradient))
        parameter.grad = gradient
