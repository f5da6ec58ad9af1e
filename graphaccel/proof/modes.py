"""Dispatch modes that make two runs of a model comparable: same random draws, one precision.

As modes they apply equally to eager code, to its backward and to a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.modes import TorchDispatchMode

aten = torch.ops.aten

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class SameDraws(TorchDispatchMode):
    """Random ops give values that depend on the state of the CPU generator and on the shape alone.

    Eager code and a captured graph use different ops for the same draw (`bernoulli_` and
    `native_dropout`, `uniform_` and `rand`), which read a generator differently. Here every draw
    takes one seed from the default CPU generator, whose state activation checkpointing restores
    before it recomputes, and fills its result from a generator with that seed.

    by_shape: the seed depends on the shape instead: for a graph that draws in another order.
    """

    def __init__(self, *, by_shape: bool = False) -> None:
        super().__init__()
        self.count = 0
        self._by_shape = by_shape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op: draws are replaced."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        built = DRAWS.get(func.overloadpacket)
        self.count += 1
        given = bound(func, args, kwargs)
        result = NotImplemented if built is None else built(self._noise, func, given)
        if result is not NotImplemented:
            return result
        with _seeded(self._seed(_shape(args))):
            return func(*args, **kwargs)

    def _seed(self, shape: tuple[int, ...]) -> int:
        if self._by_shape:
            return sum((7919 * i + 1) * n for i, n in enumerate(shape, 1)) + len(shape)
        return int(torch.randint(2**62, ()).item())

    def _noise(self, shape: Any, device: torch.device, normal: bool = False) -> Tensor:
        """float32 noise of a shape: uniform over [0, 1), or normal."""
        shape = tuple(shape)
        generator = torch.Generator(device=device).manual_seed(self._seed(shape))
        make = torch.randn if normal else torch.rand
        return make(shape, generator=generator, device=device, dtype=torch.float32)


def _shape(args: tuple) -> tuple[int, ...]:
    first = args[0] if args else ()
    if isinstance(first, Tensor):
        return tuple(first.shape)
    return tuple(first) if isinstance(first, (list, tuple)) else (int(first),)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the default generators, and restore their states afterwards."""
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        yield


Noise = Callable[..., Tensor]
Given = Mapping[str, Any]


def bound(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults included."""
    declared = func._schema.arguments
    given = {a.name: a.default_value for a in declared if a.has_default_value()}
    return given | {a.name: v for a, v in zip(declared, args, strict=False)} | dict(kwargs)


def _bernoulli(noise: Noise, func: Any, given: Given) -> Any:
    x = given["self"]
    drawn = (noise(x.shape, x.device) < given.get("p", x)).to(x.dtype)
    return given.get("out", x).copy_(drawn) if func._schema.is_mutable else drawn


def _native_dropout(noise: Noise, func: Any, given: Given) -> Any:
    x, p = given["input"], given["p"]
    if given["train"] is False or func._schema.is_mutable:
        return NotImplemented
    mask = noise(x.shape, x.device) < 1 - p
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _uniform(noise: Noise, func: Any, given: Given) -> Any:
    like = _like(func, given)
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return like.copy_(noise(like.shape, like.device) * (high - low) + low)


def _normal(noise: Noise, func: Any, given: Given) -> Any:
    like = _like(func, given)
    drawn = noise(like.shape, like.device, normal=True)
    return like.copy_(drawn * given.get("std", 1.0) + given.get("mean", 0.0))


def _like(func: Any, given: Given) -> Tensor:
    """The tensor that a draw fills: the one it writes to, or newly allocated."""
    plain = {k: given.get(k) for k in ("dtype", "device")}
    if "out" in given:
        return given["out"]
    if "size" in given:
        return torch.empty(given["size"], **plain)
    return given["self"] if func._schema.is_mutable else torch.empty_like(given["self"], **plain)


def _rrelu(noise: Noise, func: Any, given: Given) -> Any:
    x, slopes = given["self"], given["noise"]
    if not given["training"] or "out" in given:
        return NotImplemented
    low, high = given["lower"], given["upper"]
    drawn = noise(x.shape, x.device).to(x.dtype) * (high - low) + low
    drawn = torch.where(x <= 0, drawn, 1.0)
    if func.overloadpacket is aten.rrelu_with_noise_functional:
        return x * drawn, drawn
    slopes.copy_(drawn)
    return x.mul_(drawn) if func.overloadpacket is aten.rrelu_with_noise_ else x * drawn


DRAWS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli: _bernoulli,
    aten.bernoulli_: _bernoulli,
    aten.native_dropout: _native_dropout,
    aten.rand: _uniform,
    aten.rand_like: _uniform,
    aten.uniform_: _uniform,
    aten.randn: _normal,
    aten.randn_like: _normal,
    aten.normal_: _normal,
    aten.rrelu_with_noise: _rrelu,
    aten.rrelu_with_noise_: _rrelu,
    aten.rrelu_with_noise_functional: _rrelu,
}


class Widened(TorchDispatchMode):
    """Computes every op in float64: requested dtypes and narrower input tensors are widened.
    Rounding is then far below any difference between two formulas, whatever precision the model's
    code asks for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op, on its inputs in float64."""
        written = _written(func)
        args = tuple(a if i in written else _widened(a) for i, a in enumerate(args))
        kwargs = {k: v if k in written else _widened(v) for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> frozenset[Any]:
    """Positions and names of the arguments that an op writes."""
    if not func._schema.is_mutable:
        return frozenset()
    declared = enumerate(func._schema.arguments)
    results = [(i, a.name) for i, a in declared if a.alias_info and a.alias_info.is_write]
    return frozenset(key for pair in results for key in pair)


def _widened(argument: Any) -> Any:
    return pytree.tree_map_only((Tensor, torch.dtype), _wide, argument)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.double() if value.dtype in NARROW else value


class WriteGuard(TorchDispatchMode):
    """Copies each watched tensor before the first op that writes to its memory, so that weights are
    copied only where a forward changes them."""

    def __init__(self, watched: Mapping[Any, Tensor]) -> None:
        super().__init__()
        self.watch(watched)

    def watch(self, watched: Mapping[Any, Tensor]) -> None:
        """Watch these tensors from now on; `restore` brings their values back."""
        self._watched = dict(watched)
        self._copies: dict[Any, Tensor] = {}
        self._keys: dict[int, list[Any]] = {}
        for key, tensor in watched.items():
            self._keys.setdefault(_memory(tensor), []).append(key)

    def changed(self) -> tuple[Any, ...]:
        """The keys of those that have another value now. torch's parametrizations, as they are
        registered, write a parameter to itself."""
        copies = self._copies.items()
        return tuple(key for key, copy in copies if not torch.equal(self._watched[key], copy))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op; a copy is made before one that writes."""
        kwargs = kwargs or {}
        for place in _written(func):
            value = kwargs.get(place) if isinstance(place, str) else None
            if isinstance(place, int) and place < len(args):
                value = args[place]
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._keep(tensor)
        return func(*args, **kwargs)

    def _keep(self, tensor: Tensor) -> None:
        for key in self._keys.get(_memory(tensor), ()):
            if key not in self._copies:
                self._copies[key] = self._watched[key].detach().clone()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore what was overwritten."""
        for key, copy in self._copies.items():
            self._watched[key].detach().copy_(copy)
        self._copies = {}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or -id(tensor)
