"""Refuses weights that are views of one another, and gradients that are views of a larger tensor,
where a plan moves them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from graphaccel.compiler.compiler import Planned
from graphaccel.errors import GraphMisuse, Unsupported


def check_shared_memory(model: nn.Module, chosen: Planned) -> None:
    """Raises Unsupported (GA208) for a buffer or a parameter that is a view of a parameter which
    the plan moves, and GraphMisuse (GA407) for such a gradient of one: it would stay as it is."""
    sharded, plan = chosen.program.parameter_shards, chosen.plan
    for name, parameter in model.named_parameters():
        if (name in sharded or plan.pipeline > 1) and _is_part(parameter.grad):
            raise GraphMisuse(
                what=f"the gradient of `{name}` is a view of a larger tensor, and the plan moves "
                "it",
                help_line="let the first step make it:  optimizer.zero_grad(set_to_none=True)",
            )
    own = _addresses(model.named_parameters())
    for buffer, its in _addresses(model.named_buffers()).items():
        for name, memory in own.items():
            if (name in sharded or plan.pipeline > 1) and _meet(memory, its):
                raise Unsupported(
                    what=f"the buffer `{buffer}`, a view of the parameter `{name}`,",
                    reason="the plan moves the parameter, whose updates a view would not see",
                    help_line=f"read the parameter itself in forward:  self.{name}",
                    other_help="or keep parameters whole on each device:  "
                    "zero=0, tensor=1, pipeline=1",
                )
    if not (sharded or plan.zero or plan.offload or plan.pipeline > 1):
        return
    names = sorted(own, key=lambda name: own[name].start)
    for name, other in pairwise(names):
        if _meet(own[name], own[other]):
            raise Unsupported(
                what=f"the parameter `{other}`, a view of the parameter `{name}`,",
                reason="the plan moves them, and an update of one would not be seen by the other",
                help_line="have one parameter, and read it in both places:  "
                f"torch.nn.functional.linear(x, self.{name}.t())",
                other_help="or keep parameters whole on each device:  zero=0, tensor=1, pipeline=1",
            )


def _addresses(named: Iterable[tuple[str, Tensor]]) -> dict[str, range]:
    """Where dense tensors are in memory, by name."""
    result = {}
    for name, tensor in named:
        if tensor.numel() and not tensor.is_meta:
            start = tensor.data_ptr()
            result[name] = range(start, start + tensor.numel() * tensor.element_size())
    return result


def _is_part(tensor: Tensor | None) -> bool:
    """Whether a tensor is less than what its memory holds."""
    if tensor is None or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
