"""Modules: those that `torch.compile` wraps, references that recurrent layers hold, and what
DistributedDataParallel reads of one."""

from __future__ import annotations

import torch

DDP_READS = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module that DistributedDataParallel reads before it broadcasts its parameters."""


def clear_flat_weight_refs(model: torch.nn.Module) -> None:
    """Clear the weak references by which recurrent layers notice replaced weights: a tensor that
    has some can not be swapped. Swapped weights keep their identity: there is nothing to notice.

    One None for each weight: torch 2.13 compares their numbers."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weights_names)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether `torch.compile` is wrapped around a module, or set on it in place."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
