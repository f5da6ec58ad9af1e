"""Trace a fusion pattern, a plain torch function, to a canonical graph like a captured forward."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphaccel.capture.canonical.canonicalise import canonicalise
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.ir.match import Pattern
from graphaccel.ir.values import propagate

aten = torch.ops.aten
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.type_as.default, aten.to.other}
_COPIES = {aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default}


def trace_pattern(function: Callable[..., Any], values: Mapping[str, Any]) -> Pattern:
    """Trace `function` at the shapes and dtypes of some tensors (their data is not read).

    values: tensors and numbers by parameter name. A number is traced as itself and recorded, so
    that a matcher can bind it: numbers must differ from each other and from the pattern's own.
    """
    names = [n for n in inspect.signature(function).parameters if n in values]
    given = [n for n in names if isinstance(values[n], Tensor)]
    numbers = {n: values[n] for n in names if n not in given}
    mode = FakeTensorMode()
    with mode:
        fakes = [_fake(values[n]) for n in given]

    def call(*tensors: Tensor) -> list[Any]:
        built = function(**dict(zip(given, tensors, strict=True)), **numbers)
        return list(built) if isinstance(built, (tuple, list)) else [built]

    with mode, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch's warnings about mixed dtypes do not concern a model
        module = make_fx(call, pre_dispatch=True)(*fakes)
    for node, name in zip(
        [n for n in module.graph.nodes if n.op == "placeholder"], given, strict=True
    ):
        node.name = node.target = name
    with mode:
        _spell_casts(module)
        _spell_dropout(module)
        _spell_chunks(module)
    propagate(module, fakes)
    simplify(module)
    with mode:
        canonicalise(module)
    propagate(module, fakes)
    bound = {v: n for n, v in numbers.items() if not isinstance(v, bool)}
    return Pattern(module.graph, bound)


def simplify(module: fx.GraphModule) -> None:
    """Remove copies that change nothing, in place: same dtype, strides and size as their source."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in (
            *_COPIES,
            aten._to_copy.default,
            aten.reshape.default,
            aten.view.default,
        ):
            continue
        source, value = node.args[0], node.meta["val"]
        was = source.meta["val"]
        same = (was.dtype, was.shape, was.stride(), was.device) == (
            value.dtype,
            value.shape,
            value.stride(),
            value.device,
        )
        kept = any(u.op == "output" for u in node.users) and source.op == "placeholder"
        if same and not kept and node.target is not aten.detach.default:
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


def _fake(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _spell_casts(module: fx.GraphModule) -> None:
    """Spell `x.float()` and similar casts as export does. A float64 tensor is never rounded: a
    model in float64 has no such upcast."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in _CASTS:
            continue
        source, value = node.args[0], node.meta["val"]
        if source.meta["val"].dtype in (value.dtype, torch.float64) and value.is_floating_point():
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
        else:
            node.target, node.args = aten._to_copy.default, (source,)
            node.kwargs = {"dtype": value.dtype}
    module.recompile()


def _spell_chunks(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is aten.chunk.default:
            source, _, *dim = node.args
            at = dim[0] if dim else 0
            node.target = aten.split.Tensor
            node.args = (source, node.meta["val"][0].shape[at], at)
    module.recompile()


def _spell_dropout(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.target is not aten.dropout.default:
            continue
        source, p, train = node.args
        with module.graph.inserting_before(node):
            both = module.graph.call_function(aten.native_dropout.default, (source, p, train))
            both.meta["val"] = aten.native_dropout.default(source.meta["val"], p, train)
            first = module.graph.call_function(getitem, (both, 0))
            first.meta["val"] = both.meta["val"][0]
        node.replace_all_uses_with(first)
        module.graph.erase_node(node)
    module.recompile()
