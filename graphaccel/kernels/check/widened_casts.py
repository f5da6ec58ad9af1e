"""Runs code in float64 throughout, although it asks for float32 in places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WidenedCasts(TorchFunctionMode):
    """Turns every explicit request for float32 into one for float64, also while tracing.

    Model code casts to float32 on purpose: logits before the loss, attention weights before
    softmax, variances in RMS norms. In float64 that throws away 29 bits. All requests are turned,
    not only those on float64 tensors: positions cast from integers to float32 meet float64 tensors
    in a matmul, which refuses mixed dtypes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        on_meta = str((kwargs or {}).get("device")) == "meta"
        if on_meta or func is torch.ops.aten._assert_tensor_metadata.default:
            return func(*args, **(kwargs or {}))  # torch's own: it states what a value was
        widened = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
