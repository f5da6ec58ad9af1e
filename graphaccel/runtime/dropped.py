"""Placeholders for values that a step does not keep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from graphaccel.capture.state.carried import Path
from graphaccel.capture.state.left import put_at
from graphaccel.compat.torch import pytree
from graphaccel.errors import OutputDropped
from graphaccel.guards.place import Place

_ASKED = frozenset(
    f"__{name}__" for name in ("copy", "deepcopy", "getnewargs", "getnewargs_ex", "setstate")
)
"""Attributes that copy and pickle look up on any object, and that may be missing."""

_FIELDS = ("name", "attribute", "outside")


class Dropped:
    """Placeholder for a value that a step does not keep: an output called `name`, or what the
    model's forward stores in the attribute, item or entry `name`, of the model or outside of it.
    Any use of it raises OutputDropped (GA405)."""

    def __init__(self, name: str, *, attribute: bool = False, outside: bool = False) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_attribute", attribute)
        object.__setattr__(self, "_outside", outside)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any torch function called with one."""
        given = pytree.tree_leaves((args, kwargs or {}))
        return next(leaf for leaf in given if isinstance(leaf, Dropped))._raise()

    def _raise(self) -> Any:
        fields = {name: object.__getattribute__(self, f"_{name}") for name in _FIELDS}
        raise OutputDropped(**fields)

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            raise AttributeError(name)
        return self._raise()

    def _operate(self, *_: Any) -> Any:
        return self._raise()

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _operate
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operate
    __truediv__ = __rtruediv__ = __floordiv__ = __matmul__ = __rmatmul__ = __pow__ = _operate
    __mod__ = __format__ = __index__ = __contains__ = __round__ = _operate
    __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _operate
    __eq__ = __ne__ = __rfloordiv__ = __rmod__ = __divmod__ = __rdivmod__ = __pos__ = _operate
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __call__ = _operate
    __trunc__ = __floor__ = __ceil__ = __complex__ = __setitem__ = __delitem__ = _operate
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_name')}: not kept in training by this plan>"


def drop_left(model: nn.Module, left: Iterable[Path | Place]) -> None:
    """After a step: replace what the forward would have set, in the model or outside of it, by
    placeholders; the old values are not of this step."""
    for one in left:
        if isinstance(one, Place):
            one.put(Dropped(one.name, attribute=True, outside=True))
        else:
            put_at(model, one, Dropped(".".join(map(str, one)), attribute=True))
