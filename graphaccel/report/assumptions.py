"""Says what a report assumes of the optimizer's state and of how tokens choose experts."""

from __future__ import annotations

import torch

from graphaccel.planner.plan.plan import Plan


def assumed_of(optimizer: torch.optim.Optimizer | None, plan: Plan) -> str:
    """One line: the optimizer state, and how tokens choose experts."""
    state = "no optimizer state" if optimizer is None else type(optimizer).__name__
    if plan.expert == 1:
        return state
    chosen = () if plan.prediction is None else plan.prediction.chosen
    if not chosen:
        return f"{state}; each expert chosen as often as the others"
    most = max(share for block in chosen for row in block.shares for share in row)
    as_batch = (
        f"experts chosen as the example batch does, a device up to {most:.2f} of an even share"
    )
    return f"{state}; {as_batch}"
