"""Functionalization: what is written in place becomes a new value, as torch itself makes it so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def functionalized() -> Iterator[None]:
    """Meanwhile calls on tensors of `as_functional` write to none of them for those below."""
    torch._enable_functionalization(reapply_views=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._disable_functionalization()  # type: ignore[attr-defined]


@contextmanager
def below_functionalization() -> Iterator[None]:
    """Meanwhile calls are not made functional: for those on values of `behind`."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


def as_functional(value: Any) -> Any:
    """A tensor whose writes are recorded as new values; anything else as it is."""
    if not isinstance(value, torch.Tensor) or torch._is_functional_tensor(value):
        return value
    return torch._to_functional_tensor(value)  # type: ignore[attr-defined]


def behind(value: Any) -> Any:
    """The present value of a tensor of `as_functional`; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):
        return value
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value)  # type: ignore[attr-defined]
