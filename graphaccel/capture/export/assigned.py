"""Turn assignments to buffers in a forward (`self.mean = 0.9 * self.mean`) into in-place writes.

The graph then returns their new values, and the buffer stays the tensor that others refer to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class AssignedWithGradient(Exception):
    """The forward replaces a buffer by a value that requires a gradient.

    name: of the buffer in the model.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"`{name}` is replaced by a value that requires a gradient")
        self.name = name


@contextmanager
def written_in_place(model: nn.Module) -> Iterator[None]:
    """A context for one forward. A buffer that has another shape or dtype afterwards stays
    replaced.

    Raises AssignedWithGradient: the next backward would continue into this forward.
    """
    before = [
        (f"{path}.{name}" if path else name, module, name, tensor)
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    yield
    for whole, module, name, tensor in before:
        new = module._buffers.get(name)
        if new is None or new is tensor or _form(new) != _form(tensor):
            continue
        if new.requires_grad:
            raise AssignedWithGradient(whole)
        with torch.no_grad():
            tensor.copy_(new)
        module._buffers[name] = tensor


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
