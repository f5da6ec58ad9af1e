"""Axes of pictures: maps values to positions, and chooses ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from graphaccel.report.format import unit_of


@dataclass(frozen=True)
class Tick:
    """A position on an axis, in the picture's units, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to positions from `start` to `end`; logarithmically if
    `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value, to a tenth of a unit."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        share = (value - low) / (high - low) if high > low else 0.0
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int, label: Callable[[float], str]) -> tuple[Tick, ...]:
        """About `count` ticks at round values."""
        values = _log_values(self.low, self.high) if self.log else None
        if values is None or len(values) < 3:
            values = _even_values(self.low, self.high, count)
        return tuple(Tick(self(value), label(value)) for value in values)


def _even_values(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    if high <= low:
        return [low]
    rough = (high - low) / max(1, count)
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def _log_values(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten in [low, high]."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**p for p in powers for m in (1, 2, 5)]
    return [v for v in values if low <= v <= high]


def time_label(longest: float) -> Callable[[float], str]:
    """Seconds in the unit that fits `longest`, with the unit at each."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((u for u in units if longest >= u[1]), units[-1])
    return lambda seconds: f"{seconds / size:.6g} {unit}" if seconds else "0"


def bytes_label(most: int) -> tuple[Callable[[float], str], float]:
    """Bytes in the unit that fits `most`, and that unit in bytes."""
    unit, size = unit_of(most)
    return (lambda value: f"{value / size:.3g} {unit}" if value else "0"), float(size)
