"""Names, numbers and module paths as functions of the number of layers and of the copy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphaccel.ir.replication.layers import NotRepeated, Run

_WORD = re.compile("(?<=[a-z])([A-Z])")  # torch.fx inserts "_" before these in generated names


@dataclass(frozen=True)
class NumberedName:
    """`base_number`; the number grows by `slopes` per layer of each run and by `step` per copy.
    zero: the number 0 is written; otherwise it is left out."""

    base: str
    number: int
    slopes: tuple[int, ...] = ()
    step: int = 0
    zero: bool = False

    def number_at(self, more: Sequence[int], copy: int) -> int:
        number = self.number + sum(s * m for s, m in zip(self.slopes, more, strict=True))
        return number + self.step * (copy - 1)

    def at(self, more: Sequence[int], copy: int) -> str:
        number = self.number_at(more, copy)
        return f"{self.base}_{number}" if number or self.zero else self.base

    def among(self, more: Sequence[int]) -> NumberedName:
        """The name once `more` layers are fixed: `at((), copy)` then gives it."""
        return NumberedName(self.base, self.number_at(more, 1), (), self.step, self.zero)


@dataclass(frozen=True)
class LayerPath:
    """A module path or parameter name: entry `entry.number_at` of the container of `run`, whose
    entries are named by number; without a run `plain` is the name."""

    plain: str
    run: Run | None = None
    entry: NumberedName = NumberedName("", 0)

    def at(self, more: Sequence[int], copy: int) -> str:
        """The name among all layers."""
        if self.run is None:
            return self.plain
        return self.run.entry(self.plain, self.entry.number_at(more, copy))

    def all_at(self, copies: Sequence[int]) -> list[str]:
        """The names of copies, once the number of layers is fixed."""
        if self.run is None:
            return [self.plain] * len(copies)
        before, after = self.run.around(self.plain)
        first = self.run.first + self.entry.number - self.entry.step
        return [f"{before}{first + self.entry.step * copy}{after}" for copy in copies]

    def among(self, more: Sequence[int]) -> LayerPath:
        """The path once `more` layers are fixed."""
        return self if self.run is None else replace(self, entry=self.entry.among(more))


def renamed_placeholder(name: str, old: str, new: str) -> str:
    """The name of a placeholder, with the parameter name in it replaced by another one."""
    if old == new:
        return name
    plain = [re.sub(r"[^0-9A-Za-z]+", "_", path) for path in (old, new)]
    snake = [_WORD.sub(r"_\1", path).lower() for path in plain]
    for before, after in (plain, [path.lower() for path in plain], snake):
        if before in name:
            return name.replace(before, after)
    raise NotRepeated(f"{name} is not called after {old}")
