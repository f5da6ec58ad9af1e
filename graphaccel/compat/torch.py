"""Everything graphaccel uses of torch that torch does not promise to keep.

The only file that may import names with an underscore from torch. Each name says what it is used
for, so that a new torch version is checked here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

# Tensors with shapes and no data: tracing and propagation.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Meshes of owners, to present parameters as DTensors (runtime/state.py).
from torch.distributed.device_mesh import DeviceMesh

# Raised by export where the user's code branches on the value of a tensor (capture/export.py).
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentError

# Graphs as Python source: the calling convention of stage graphs (BoxedCode).
from torch.fx.graph import CodeGen

# Trees with key paths; torch.utils.pytree of later versions has them publicly.
from torch.utils import _pytree as pytree

# Sees every operator that runs, also inside backward: measuring tensor bytes (runtime/meter.py).
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


def schema(node: fx.Node) -> list[Any]:
    """The declared arguments (name, type, default_value, kwarg_only) of a call to an ATen op."""
    return list(node.target._schema.arguments)


class BoxedCode(CodeGen):
    """Code of a graph that takes one list and empties it, so that inputs die after their last
    use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the generated function: unpack the list, then empty it."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
        return f"def forward(self, boxed):{unpack}\n    boxed.clear()"


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, fake ones included."""
    return tensor.untyped_storage()._cdata


def submesh(device: str, ranks: list[int], rank: int) -> DeviceMesh:
    """A mesh of some ranks without process groups of its own; `rank` need not be one of them."""
    return DeviceMesh(device, ranks, _init_backend=False, _rank=rank)


def is_known(size: torch.SymInt) -> bool:
    """Whether a size has a value: one that stems from the data of a tensor has none."""
    return size.node.has_hint()


def fake_mode_of(nodes: list[fx.Node]) -> Any:
    """The fake-tensor mode that the values of `nodes` belong to."""
    for node in nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode()


__all__ = ["DataDependentError", "TorchDispatchMode", "is_traceable_wrapper_subclass", "pytree"]
