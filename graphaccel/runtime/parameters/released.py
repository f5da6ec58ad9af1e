"""Makes a model that ran under a plan a plain one again, with the weights it has."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphaccel.compat.torch.tensors import reregister_hooks
from graphaccel.runtime.agreement import STATE
from graphaccel.runtime.module import detach
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.parameters.state import whole_tensor
from graphaccel.runtime.parameters.swap import swap
from graphaccel.runtime.session import Session

_PARTS = (ShardTensor, RemoteTensor)
_OWN = ("local", "sharding", "elsewhere")


def release(model: nn.Module) -> None:
    """Let an optimized model be a plain one with its weights, which may be optimized anew, with
    another optimizer. Collective."""
    handle: Any = model.graphaccel
    if handle.session is not None:
        handle.agree(STATE)
        _hold_whole(handle.session, model)
    detach(model)


def _hold_whole(session: Session, model: nn.Module) -> None:
    """Parameters and buffers of which this rank has a part, or nothing, are whole ones on the CPU;
    parameters keep their identity. Gradients are dropped. Collective."""
    done: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        parameter.grad = None
        whole = whole_tensor(session, name, parameter)
        if isinstance(parameter, _PARTS):
            built = nn.Parameter(whole.cpu(), requires_grad=parameter.requires_grad)
            vars(built).update(_attributes(parameter))
            swap(parameter, built, lambda gradient: gradient)  # it has none
            reregister_hooks(parameter)
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            whole = whole_tensor(session, f"{prefix}.{name}" if prefix else name, buffer)
            if isinstance(buffer, _PARTS):
                setattr(module, name, whole.cpu())


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """What the script has put on a parameter."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN}
