"""Hooks before an optimizer's step: after its closure, where `optimizer.step(closure)` has one.

A closure computes the gradients that clipping, unscaling and sharding change, and on the first
step the plan that decides about them. torch.optim's optimizers (all but LBFGS) call it once, before
they read parameters or gradients: it is replaced by one that runs these hooks after it. An
optimizer that may call its closure several times gets the hooks before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Optimizer = torch.optim.Optimizer
Hook = Callable[[Optimizer, tuple, dict[str, Any]], Any]


def closure_of(args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, of which the first is the optimizer."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def calls_closure_first(optimizer: Optimizer) -> bool:
    """Whether a step is known to call its closure once, before all else."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and kind is not torch.optim.LBFGS


class StepHooks:
    """The hooks of one optimizer, in the order in which they are added."""

    def __init__(self) -> None:
        self._hooks: list[Hook] = []
        self._after_closures: list[Hook] = []

    def start(self, optimizer: Optimizer) -> None:
        """Run the hooks in every step from now on."""
        optimizer.register_step_pre_hook(self._before)

    def add(self, hook: Hook) -> None:
        """Run `hook(optimizer, args, kwargs)` in every step."""
        self._hooks.append(hook)

    def add_first(self, hook: Hook) -> None:
        """Run a hook in every step, before all others."""
        self._hooks.insert(0, hook)

    def add_after_closures(self, hook: Hook) -> None:
        """Run a hook in steps with a closure only, after all others."""
        self._after_closures.append(hook)

    def _before(
        self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        closure = closure_of(args, kwargs)
        if closure is None or not calls_closure_first(optimizer):
            for hook in self._hooks:
                hook(optimizer, args, kwargs)
            return None

        def closure_then_hooks() -> Any:
            loss = closure()
            for hook in (*self._hooks, *self._after_closures):
                hook(optimizer, args[:1], {})
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_hooks}
        return (args[0], closure_then_hooks, *args[2:]), kwargs
