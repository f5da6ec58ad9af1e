"""Run a float64 model in float64 throughout, although its code asks for float32 in places.

Model code casts to float32 on purpose: logits before the loss, attention weights before softmax,
variances in RMS norms. In half precision that helps; in float64 it throws away 29 bits, and the
comparison of two computations of the same gradient stops at 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float32IsFloat64(TorchFunctionMode):
    """Reads every explicit request for float32 as one for float64, also while tracing.

    All requests, not only those on float64 tensors: positions cast from integers to float32 meet
    float64 tensors in a matrix product, which refuses mixed dtypes.
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
            return func(*args, **(kwargs or {}))  # torch's own: it says what a value was
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*(_widen(value) for value in args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def lift_loss_cast() -> Iterator[None]:
    """Casts to float32 become casts to float64, in eager code and under `torch.export`."""
    with _Float32IsFloat64():
        yield
