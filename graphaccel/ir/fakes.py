"""Cache of fake results: each op runs once for all calls with equal tensor metadata.

For graphs that are measured and not run: all tensors with the same dtype, sizes and strides are one
object here, so that such a graph has correct sizes, but does not tell which tensors share storage.
The layers of a deep model repeat the same few calls, and so do its layouts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import (
    FakeTensorMode,
    fake_like_meta,
    has_meta_kernel,
    uncached_fake_mode,
    without_torch_dispatch,
)

PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device)
PLAIN += (torch.layout, torch.memory_format)
"""Arguments that are compared by value."""
_PLAIN = frozenset(PLAIN)


class Fakes:
    """mode: the fake mode of its tensors; its own if none is given. shadows: by id of a tensor, the
    tensor and a meta tensor of the same metadata."""

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or uncached_fake_mode()
        self._representatives: dict[Hashable, torch.Tensor] = {}
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id
        self._given: dict[Hashable, Any] = {}
        self._shaped: dict[Hashable, torch.Tensor] = {}
        self._shadows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(self, target: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The result of `target`. Nodes among the arguments are replaced by their values."""
        key = target, *map(self._key, args)
        if kwargs:
            key += tuple((name, self._key(value)) for name, value in kwargs.items())
        try:
            return self._given[key]
        except KeyError:
            args, kwargs = self._liked(args), {k: self._liked(v) for k, v in kwargs.items()}
            built = self._on_meta(target, args, kwargs) if has_meta_kernel(target) else None
            if built is None:
                with self.mode:
                    built = self._liked(target(*args, **kwargs))
            self._given[key] = built
            return built

    def like(self, value: Any, shape: Sequence[int]) -> torch.Tensor:
        """Like `ir.values.fake_like`: a contiguous tensor of another shape."""
        if tuple(value.shape) == tuple(shape):
            return self._liked(value)
        kind = self._key(value), tuple(shape)
        if kind not in self._shaped:
            with self.mode:
                built = torch.empty(kind[1], dtype=value.dtype, device=value.device)
            self._shaped[kind] = self._one(built)
        return self._shaped[kind]

    def propagate(self, graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> None:
        """Set `meta["val"]` on every node by running the graph on `inputs`, in place."""
        given = iter(inputs)
        with torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    node.meta["val"] = self._liked(next(given))
                elif node.op == "call_function":
                    node.meta["val"] = self.call(node.target, node.args, node.kwargs)

    def _on_meta(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call by the meta kernel of its op, in a tenth of the time of fake
        tensors; None where that is not enough: tensors are on several devices or there are none, or
        the result depends on their data."""
        leaves = pytree.tree_leaves((args, kwargs))
        devices = {x.device for x in leaves if isinstance(x, torch.Tensor)}
        named = any(isinstance(x, torch.device) for x in leaves)
        if named or len(devices) != 1 or any(map(_turned, leaves)):
            return None
        (device,) = devices
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._shadow, (args, kwargs))
        try:
            with without_torch_dispatch():
                built = target(*args, **kwargs)
        except RuntimeError:
            return None  # fake tensors give the reason
        return pytree.tree_map_only(torch.Tensor, lambda one: self._one(one, device), built)

    def _shadow(self, like: torch.Tensor) -> torch.Tensor:
        """A meta tensor with the metadata of a representative tensor."""
        if id(like) not in self._shadows:
            with without_torch_dispatch():
                built = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device="meta"
                )
            self._shadows[id(like)] = like, built
        return self._shadows[id(like)][1]

    def _key(self, value: Any) -> Hashable:
        """A hashable key of an argument: tensors by their representative; 1, 1.0 and True
        differ."""
        kind = type(value)
        if kind is fx.Node:
            value = value.meta["val"]
            kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, torch.Tensor):
            known = self._seen.get(id(value))
            return id(self._one(value) if known is None else known[1])
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        return (kind if isinstance(value, PLAIN) else id(kind)), value

    def _liked(self, value: Any) -> Any:
        """The value with its tensors replaced by their representatives."""
        if isinstance(value, fx.Node):
            value = value.meta["val"]
        if isinstance(value, torch.Tensor):
            known = self._seen.get(id(value))
            return self._one(value) if known is None else known[1]
        if isinstance(value, (tuple, list)):
            return (tuple if isinstance(value, tuple) else list)(map(self._liked, value))
        return value

    def _one(self, tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """The representative of a tensor, on another device if one is given."""
        device = device or tensor.device
        kind = (tensor.dtype, device, tuple(tensor.shape), tensor.stride(),
                tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())  # fmt: skip
        like = self._representatives.get(kind)
        if like is None:
            own = getattr(tensor, "fake_mode", None) is self.mode
            like = self._representatives[kind] = tensor if own else self._in_mode(tensor, device)
            self._seen[id(like)] = like, like
        if not tensor.is_meta:  # meta tensors belong to one call only
            self._seen[id(tensor)] = tensor, like
        return like

    def _in_mode(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor in this mode with the metadata of one of another mode or of the meta
        device."""
        with without_torch_dispatch():
            built = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
        like = fake_like_meta(self.mode, built, device)
        self._shadows[id(like)] = like, built
        return like


def _turned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())
