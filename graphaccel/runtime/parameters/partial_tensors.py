"""What holds of all tensors of which this rank has a part or nothing: `.data` and deep copies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from graphaccel.errors import GraphMisuse


def check_same_kind(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Raises GraphMisuse (GA407) if a tensor of which this rank holds a part or nothing would
    become one of another shape or dtype."""
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise GraphMisuse(
            what=f"`.data` of a parameter of shape {list(tensor.shape)} in {tensor.dtype} was set "
            f"to a tensor of shape {list(value.shape)} in {value.dtype}, and this rank held only a "
            "part of it or none",
            help_line="copy values into it:  model.load_state_dict(state)",
        )


def copied(tensor: Any, built: Any, memo: dict[int, Any]) -> Any:
    """`built`, a copy of the tensor's values, with the attributes that a deep copy also copies."""
    if isinstance(tensor, nn.Parameter):
        built = nn.Parameter(built, tensor.requires_grad)
    else:
        built.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    memo[id(tensor)] = built
    if tensor.grad is not None:
        built.grad = copy.deepcopy(tensor.grad, memo)
    for name, value in vars(tensor).items():
        if name not in vars(built):
            setattr(built, name, copy.deepcopy(value, memo))
    return built
