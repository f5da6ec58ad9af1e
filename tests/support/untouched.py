"""Asserts that a refused call left the user's objects as they were, and what the text says."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.errors import GraphAccelError
from graphaccel.runtime.parameters.remote import RemoteTensor

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def refused(
    kind: type[GraphAccelError], text: str, model: nn.Module, optimizer: Any = None
) -> Iterator[None]:
    """The block raises exactly `kind` with `text`, and changes neither model nor optimizer.

    Same class, same tensor objects with the same bits and gradients, modes, hooks, optimizer state.
    `text` has places as `file.py:LINE`, without folders.
    """
    before, held = _picture(model, optimizer), dict(model.named_parameters())
    held |= dict(model.named_buffers())
    values = {
        name: tensor.detach().clone()
        for name, tensor in held.items()
        if not (tensor.is_meta or isinstance(tensor, RemoteTensor))
    }
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    with pytest.raises(GraphAccelError) as caught:
        yield
    assert type(caught.value) is kind
    assert plain_places(str(caught.value)) == text
    assert _picture(model, optimizer) == before
    for name, value in values.items():
        assert torch.equal(held[name].detach().to_dense(), value.to_dense()), name
    if optimizer is not None:
        after = optimizer.state_dict()
        assert after["param_groups"] == state["param_groups"]
        assert str(after["state"]) == str(state["state"])


def plain_places(text: str) -> str:
    """The text with the folder of each `-->` place left out."""
    lines = []
    for line in text.splitlines():
        head, arrow, place = line.partition("--> ")
        lines.append(f"{head}{arrow}{os.path.basename(place)}" if arrow else line)
    return "\n".join(lines)


def _picture(model: nn.Module, optimizer: Any) -> tuple[Any, ...]:
    modules = tuple(
        (name, type(m), m.training, tuple(tuple(getattr(m, h)) for h in HOOKS))
        for name, m in model.named_modules()
    )
    tensors = tuple(
        (name, id(t), type(t), t.requires_grad, t.device, t.dtype, id(t.grad))
        for name, t in (*model.named_parameters(), *model.named_buffers())
    )
    if optimizer is None:
        return modules, tensors, ()
    groups = tuple(tuple(id(p) for p in group["params"]) for group in optimizer.param_groups)
    hooks = (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))
    return modules, tensors, (type(optimizer), groups, hooks)
