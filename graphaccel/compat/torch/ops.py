"""ATen ops: what their schemas declare and which of them are composed of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

# Which ops are composed of others, and which of these stay one call where no op is decomposed on
# purpose (capture/export/decompose.py does what `ExportedProgram.run_decompositions({})` does).
from torch._export.utils import _is_cia_op, _is_preservable_cia_op

from graphaccel.compat.torch import pytree


def schema(node: fx.Node) -> list[Any]:
    """The declared arguments (name, type, default_value, kwarg_only) of a call to an ATen op."""
    target: Any = node.target
    return list(target._schema.arguments)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a call writes to."""
    declared = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = {a.name: v for a, v in zip(declared, node.args, strict=False)} | dict(node.kwargs)
    written = [a.name for a in declared if a.alias_info is not None and a.alias_info.is_write]
    values = pytree.tree_leaves([given[name] for name in written if name in given])
    return [v for v in values if isinstance(v, fx.Node)]


def is_higher_order(target: Any) -> bool:
    """Whether the target of a call is an operator on graphs or other operators."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def written_by(node: fx.Node) -> str:
    """The name of the op that a call to a higher-order operator makes functional; "" if none."""
    functional = "auto_functionalized" in str(node.target) and node.args
    return node.args[0].name() if functional else ""  # type: ignore[union-attr]


def is_view(node: fx.Node) -> bool:
    """Whether a call returns a view of its input and writes nothing."""
    declared = getattr(node.target, "_schema", None)
    if declared is None or declared.is_mutable:
        return False
    return any(r.alias_info is not None for r in declared.returns)


def decomposes(op: Any, devices: Iterable[torch.device]) -> bool:
    """Whether an op on tensors of these devices is composed of others where gradients are recorded:
    a trace then records those."""

    def has(key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    own = {torch._C._dispatch_key_for_device(device.type) for device in devices}
    return has("CompositeImplicitAutograd") and not any(map(has, own))


def is_composite(op: Any) -> bool:
    """Whether an op is composed of others, the same on every device."""
    return _is_cia_op(op)


def is_preservable_composite(op: Any) -> bool:
    """Whether an op that is composed of others stays one call in a functional graph: it returns no
    view of what it reads, and writes nothing."""
    return _is_preservable_cia_op(op)


def writes_beyond_schema(op: Any) -> bool:
    """Whether an op may write what its schema does not declare: batch norms of before
    `_native_batch_norm_legit` write their running statistics so."""
    name = str(getattr(op, "_schema", ""))
    return "batch_norm" in name and "_native_batch_norm_legit" not in name


def grad_region(node: fx.Node) -> tuple[bool, str, tuple[fx.Node, ...]] | None:
    """Of a call to a subgraph that runs with gradients recorded or not (export's form of
    `torch.set_grad_enabled`): whether they are, the subgraph's attribute, and its inputs."""
    if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
        return None
    enabled, graph, *inputs = node.args
    return bool(enabled), str(graph.target), tuple(inputs)  # type: ignore[union-attr, arg-type]
