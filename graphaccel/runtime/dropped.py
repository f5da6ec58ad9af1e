"""Placeholders for values that a step does not keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphaccel.compat.torch import pytree
from graphaccel.errors import OutputDropped

_ASKED = frozenset(
    f"__{name}__" for name in ("copy", "deepcopy", "getnewargs", "getnewargs_ex", "setstate")
)
"""Attributes that copy and pickle look up on any object, and that may be missing."""


class Dropped:
    """Placeholder for a value that a step does not keep: an output called `name`, or a tensor that
    the model's forward stores in the attribute `name`. Any use of it raises OutputDropped (GA405).
    """

    def __init__(self, name: str, *, attribute: bool = False) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_attribute", attribute)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any torch function called with one."""
        given = pytree.tree_leaves((args, kwargs or {}))
        return next(leaf for leaf in given if isinstance(leaf, Dropped))._raise()

    def _raise(self) -> Any:
        read = object.__getattribute__
        raise OutputDropped(name=read(self, "_name"), attribute=read(self, "_attribute"))

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            raise AttributeError(name)
        return self._raise()

    def _operate(self, *_: Any) -> Any:
        return self._raise()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _operate
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operate
    __truediv__ = __rtruediv__ = __floordiv__ = __matmul__ = __rmatmul__ = __pow__ = _operate
    __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _operate

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')}: not kept in training by this plan>"


def drop_left(model: nn.Module, left: Iterable[tuple[str, ...]]) -> None:
    """After a step: replace the attributes that the forward would have set by placeholders; their
    old values are not of this step."""
    for path in left:
        _put_at(model, path, Dropped(".".join(path), attribute=True))


def _put_at(model: nn.Module, path: tuple[str, ...], value: Any) -> None:
    """Put a value where a forward of a copy of the model stored a tensor: in the attribute, or in
    the container that the attribute holds now."""
    holder: Any = model
    for i, name in enumerate(path):
        last = i == len(path) - 1
        if isinstance(holder, list):
            while len(holder) <= int(name):
                holder.append(value)
            inner = holder[int(name)]
            if last or not _open(inner):
                holder[int(name)] = value
                return
        elif isinstance(holder, dict):
            key = next((k for k in holder if str(k) == name), name)
            inner = holder.get(key)
            if last or not _open(inner):
                holder[key] = value
                return
        else:
            inner = holder._modules.get(name) if isinstance(holder, nn.Module) else None
            inner = vars(holder).get(name) if inner is None else inner
            if last or not _open(inner):
                vars(holder)[name] = value
                return
        holder = inner


def _open(value: Any) -> bool:
    """Whether a path can continue inside a value."""
    if isinstance(value, (list, dict, nn.Module)):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor))
