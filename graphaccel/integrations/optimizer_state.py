"""Writes and reads the optimizer state of a planned model: each rank its own part."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the optimizer state into `folder`. Called by every rank."""
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read the optimizer state from `folder`, whatever the plan it was written under.

    The model has its plan already. Called by every rank.
    """
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    partly = StateDictOptions(strict=False)  # parameters of other stages have no state here
    set_optimizer_state_dict(model, optimizer, state, options=partly)
