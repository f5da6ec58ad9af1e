"""Moves a model to the device of its rank, and back where what follows fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from graphaccel.compiler.model import tensor_bytes


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to this rank's device; if the block fails, back to where it was.

    A model on the meta device stays there. A model that would leave no room for its gradients is
    not moved as a whole: each tensor is moved to where the plan puts it (`runtime.session`).
    """
    before = next(nn.Module.parameters(model)).device
    moves = device.type != "cpu" and before.type != "meta"
    if moves and before.type == "cpu":
        size = sum(map(tensor_bytes, (*nn.Module.parameters(model), *model.buffers())))
        moves = 2 * size <= torch.cuda.mem_get_info(device)[0]
    if moves:
        model.to(device)
    try:
        yield
    except BaseException:
        if moves:
            model.to(before)
        raise
