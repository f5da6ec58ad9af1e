"""Optimizers: fused multi-tensor updates, the loss scale's kernels and the order of step hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def is_initialised(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the constructor of `torch.optim.Optimizer` ran, which makes its hooks."""
    return hasattr(optimizer, _BEFORE)


def drop_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer, a copy of another one, no hooks of steps."""
    for name in (_BEFORE, _AFTER):
        setattr(optimizer, name, OrderedDict())


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """All that runs before and after each step of an optimizer, that of all optimizers included."""
    known: Any = (
        getattr(optimizer, _BEFORE),
        getattr(optimizer, _AFTER),
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return [hook for some in known for hook in some.values()]


def fused_adam(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: torch.Tensor | None,
) -> None:
    """torch's fused Adam or AdamW (decoupled), in place; `steps` are those of this update."""
    run = torch._fused_adamw_ if decoupled else torch._fused_adam_
    run(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False, grad_scale=grad_scale,
    )  # fmt: skip


def fused_sgd(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    first: bool,
    grad_scale: torch.Tensor | None,
) -> None:
    """torch's fused SGD, in place; buffers: empty without momentum. first: they hold no values
    yet."""
    torch._fused_sgd_(
        params, grads, buffers, weight_decay=weight_decay, momentum=momentum, lr=lr,
        dampening=dampening, nesterov=nesterov, maximize=False, is_first_step=first,
        grad_scale=grad_scale,
    )  # fmt: skip


def unscale(gradients: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Divide gradients by a scale, in place, in one pass over each. Returns 1 where one of them is
    not finite then, else 0: a float32 scalar on the device of `scale`."""
    overflow = torch.zeros((), device=scale.device)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for group in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow, scale.reciprocal())
    return overflow


def update_scale(
    scale: torch.Tensor, good: torch.Tensor, overflow: torch.Tensor, interval: int
) -> None:
    """torch.amp.GradScaler's new scale after a step, in place: half after an overflow (`overflow`),
    twice after `interval` steps without one. good: how many there were, int32."""
    torch._amp_update_scale_(scale, good, overflow, 2.0, 0.5, interval)


def order_step_hooks(optimizer: torch.optim.Optimizer, before: int, after: int) -> bool:
    """Whether the pre-hook of id `before` is the last one; the post-hook `after` becomes the
    first."""
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    if next(iter(hooks)) != after:
        hooks.move_to_end(after, last=False)
    return next(reversed(optimizer._optimizer_step_pre_hooks)) == before
