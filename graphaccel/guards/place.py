"""One Python value that a forward reads, and where it is."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from graphaccel.guards.followed import ClassKey
from graphaccel.guards.lines import Read
from graphaccel.guards.tokens import MISSING, token_of, values_of


@dataclass(frozen=True, eq=False)
class Place:
    """One Python value that a forward reads.

    name: unique, the same in every process: `blocks.0.alpha`, `train.SCALE[0]`. holder, key: where
    it is stored. how: how it is read from there: "dict", "item" (of a list), "fixed" (of a tuple),
    "attribute", "cell", "context" (of a ContextVar), "proxy" (of a mapping), "call" (by calling
    the holder) or "values" (of a tensor in a dict). line: what first read it. shared: it is stored
    outside of the model, so copies of the model read the same one.
    """

    name: str
    holder: Any = field(repr=False)
    key: Any
    how: str
    value: Any = field(repr=False)
    line: Read = field(repr=False, default=None)
    shared: bool = False

    @functools.cached_property
    def token(self) -> Any:
        """What is compared: a scalar's type and value, a container's type and keys, ..."""
        return values_of(self.value) if self.how == "values" else token_of(self.value)

    @property
    def is_number(self) -> bool:
        """Whether it is an int or a float that can be replaced in its place."""
        return type(self.value) in (int, float) and self.how not in ("fixed", "proxy", "call")

    def put(self, value: Any) -> None:
        """Replace the value."""
        if self.how == "cell":
            self.holder.cell_contents = value
        elif self.how == "attribute":
            setattr(self.holder, self.key, value)
        elif self.how == "context":
            self.holder.set(value)
        elif isinstance(self.key, ClassKey):
            setattr(self.key.owner, str(self.key), value)
        elif value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value
