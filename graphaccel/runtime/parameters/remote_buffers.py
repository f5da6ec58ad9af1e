"""Buffers of a model that only other pipeline ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphaccel.runtime.parameters.remote import Elsewhere, RemoteTensor


class RemoteBuffers:
    """What stands for them: module, name in it, and remote tensor."""

    def __init__(self) -> None:
        self._left: list[tuple[nn.Module, str, RemoteTensor]] = []

    def leave(
        self, model: nn.Module, where: Callable[[str], Elsewhere | None], device: torch.device
    ) -> None:
        """Put remote tensors in the place of buffers. where: None for one that this rank holds."""
        for prefix, module in model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                elsewhere = where(f"{prefix}.{name}" if prefix else name)
                if elsewhere is not None:
                    left = RemoteTensor(buffer, elsewhere, device)
                    setattr(module, name, left)
                    self._left.append((module, name, left))

    def leave_replaced(self) -> None:
        """The same for new ones, which the script gave every rank (`model.mask = mask`): the rank
        that reads them has them."""
        for module, name, left in self._left:
            new = module._buffers.get(name)
            if new is None or isinstance(new, RemoteTensor):
                continue
            if (new.shape, new.dtype) == (left.shape, left.dtype):
                setattr(module, name, left)
