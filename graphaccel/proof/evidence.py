"""Judges what equal values prove: NaNs and zeros are equal in a wrong graph too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphaccel.proof.results import Deviation, Results, shown


@dataclass(frozen=True)
class Proof:
    """proved: whether it was compared and is equal. text: for the progress line. error: the largest
    difference. again: not proved because of the values of this batch: another one may do. early:
    not proved because the model has no weights yet. graph: sums of what the graph gave for the
    whole batch, with a step's own draws and precision, where that was compared."""

    proved: bool
    text: str
    error: float = 0.0
    retry: bool = False
    early: bool = False
    graph: Results | None = field(default=None, repr=False)


def judge(deviations: Sequence[Deviation], *, trained: bool, note: str = "") -> Proof:
    """What equal values prove of a graph. found: none of them wrong. trained: whether some
    parameter has to get a gradient. note: appended to the text of a proof."""
    reason = _nothing(deviations, trained=trained)
    if reason:
        return Proof(False, reason, retry=bool(deviations))
    gradients = [one for one in deviations if one.kind == "gradient"]
    zero = sum(bool(one.void) for one in gradients)
    count = len(gradients) - zero
    what = "loss" if any(one.kind == "loss" for one in deviations) else "outputs"
    error = max((one.error for one in deviations), default=0.0)
    text = f"{what} and {count} gradient{'s' * (count != 1)} equal eager's ({shown(error)})"
    if zero:
        text += f", {zero} {'are' if zero > 1 else 'is'} zero on these rows"
    return Proof(True, text + note, error)


def _nothing(deviations: Sequence[Deviation], *, trained: bool) -> str:
    """Why equal values prove nothing; empty where they do."""
    if all(one.void == "empty" for one in deviations):
        return "there is no number to compare: neither a loss nor an output nor a gradient has one"
    gradients = [one for one in deviations if one.kind == "gradient"]
    odd = [one for one in gradients if one.void == "not finite"]
    for one in deviations:
        if one.kind in ("loss", "output") and one.void == "not finite":
            return f"eager's own {one.what} is NaN or infinite on this batch"
    if odd:
        return (
            f"{len(odd)} of eager's own {len(gradients)} gradients are NaN or infinite on this "
            f"batch, first the {odd[0].what}"
        )
    if trained and not gradients:
        return "no parameter gets a gradient on this batch"
    if gradients and all(one.void for one in gradients):
        return f"all {len(gradients)} gradients of eager's are zero on this batch"
    return ""
