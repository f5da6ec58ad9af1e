"""Modules: those that `torch.compile` wraps, references that recurrent layers hold, and what
DistributedDataParallel reads of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.modes import without_modes

DDP_READS = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module that DistributedDataParallel reads before it broadcasts its parameters."""


def clear_flat_weight_refs(model: torch.nn.Module) -> None:
    """Clear the weak references by which recurrent layers notice replaced weights: a tensor that
    has some can not be swapped. Swapped weights keep their identity: there is nothing to notice.

    One None for each weight: torch 2.13 compares their numbers."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights_names)


def global_hooks() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Hooks that torch calls around every module of the process, each with its kind. Those of torch
    itself (`FlopCounterMode`) only look on."""
    kinds = {
        "forward hook": torch.nn.modules.module._global_forward_hooks,
        "forward pre-hook": torch.nn.modules.module._global_forward_pre_hooks,
        "backward hook": torch.nn.modules.module._global_backward_hooks,
        "backward pre-hook": torch.nn.modules.module._global_backward_pre_hooks,
    }
    for kind, hooks in kinds.items():
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                yield kind, hook


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `torch.compile` is wrapped around a module, or set on it in place."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


@contextmanager
def conversions_checked(changed: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Meanwhile `module.to(dtype)` and the like leave a module as it is where they would not change
    it, which torch does by swapping tensors that a trace holds; `changed` is called where they
    would."""

    def convert(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        modules = self.modules() if recurse else (self,)
        tensors = [t for m in modules for t in chain(m._parameters.values(), m._buffers.values())]
        kinds = {(t.dtype, t.device) for t in tensors if t is not None}
        with without_modes(), FakeTensorMode(), torch._C.DisableTorchFunction():
            for dtype, device in kinds:
                tried = torch.empty((), dtype=dtype, device=device)
                if fn(tried) is not tried:
                    changed(self)
        return self

    with patch.object(torch.nn.Module, "_apply", convert):
        yield
