"""What explanations of a plan consist of: choices, prices, shifts, and why not another plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One value of a decision and the best plan that has it.

    name: of that plan, "" where there is none. seconds, peak: its prediction. reason: why it lost.
    """

    value: str
    name: str
    seconds: float | None
    peak: int | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """One decision: what was chosen, and the other values, best first."""

    name: str
    value: str
    pinned: bool
    others: tuple[Choice, ...]


@dataclass(frozen=True)
class Price:
    """The value of one change of the problem. seconds: of the best plan then, name: that plan, ""
    and None where nothing fits. gain: the share of the time it saves; negative where it costs."""

    change: str
    seconds: float | None
    name: str
    gain: float | None


@dataclass(frozen=True)
class Shift:
    """One rate of the calibration moved. regret: by which share the chosen plan is then slower than
    the best, `best`."""

    rate: str
    factor: float
    regret: float
    best: str


@dataclass(frozen=True)
class Explanation:
    """Why the plan was chosen."""

    decisions: tuple[Decision, ...]
    prices: tuple[Price, ...]
    shifts: tuple[Shift, ...]


@dataclass(frozen=True)
class Answer:
    """Why not: the best plan under the asked pins against the chosen one.

    verdict: "chosen", "slower", "as fast", "faster", "does not fit" or "can not be". terms: seconds
    by cause, theirs: of the chosen plan. breakdown: bytes at the peak on `rank`. reason: in one
    sentence.
    """

    asked: str
    verdict: str
    reason: str
    name: str = ""
    seconds: float | None = None
    terms: Mapping[str, float] | None = None
    theirs: Mapping[str, float] | None = None
    peak: int | None = None
    rank: int = 0
    breakdown: Mapping[str, int] | None = None
