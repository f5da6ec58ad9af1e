"""Hooks on modules, which a graph does not run: the modules in it are not called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from graphaccel.compat.torch.modules import global_hooks

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def hooks_on(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str | None, str, Callable[..., Any]]]:
    """Name of the module (None for all modules of the process), kind and function of each hook
    that is not part of what a capture sees."""
    for kind, hook in global_hooks():
        yield None, kind, hook
    for name, module in modules:
        for attribute, kind in _HOOKS.items():
            for hook in getattr(module, attribute).values():
                known = getattr(type(hook), "__module__", "").startswith("torch.nn.utils")
                # A hook of gradient checkpointing; the captured graph does not need it.
                if not known and getattr(hook, "__name__", "") != "make_inputs_require_grads":
                    yield name, kind, hook


def inner_hooks(modules: Iterable[tuple[str, nn.Module]]) -> bool:
    """Whether a forward of the model calls hooks that its graph does not."""
    return any(name != "" and "forward" in kind for name, kind, _ in hooks_on(modules))
