"""Records the random draws of a graph, and gives them to eager code.

The graph then draws as a training step does, so that one run of it is compared with eager code and,
later, with the plan's step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.ir.calls import is_random
from graphaccel.proof.modes import Given, bound

aten = torch.ops.aten


@dataclass(frozen=True)
class Draw:
    """The values of one draw, and the distribution they are from: its kind and parameters. A mask
    has a number above 0 where it keeps a value."""

    values: Tensor
    source: tuple[Any, ...]


class RecordDraws(TorchDispatchMode):
    """Lists every draw. `can_be_recorded` says which graphs draw nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Draw] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        source = _source(func, args, kwargs)
        if source is not None:
            mask = func.overloadpacket is aten.native_dropout
            self.made.append(Draw(result[1] if mask else result, source))
        return result


class ReplayDraws(TorchDispatchMode):
    """Gives eager code the draws of a graph, in its order.

    As in `SameDraws`, each draw takes one number from the default CPU generator, whose state
    activation checkpointing restores before it recomputes; the number says which draw it is.

    matched: whether eager code made the draws of the graph: each of them, of the same shape and
    distribution, and no other.
    """

    def __init__(self, draws: list[Draw]) -> None:
        super().__init__()
        generator = torch.Generator()
        generator.set_state(torch.random.get_rng_state())
        self._made = {_number(generator): draw for draw in draws}
        self._left = set(self._made)
        self._other = False

    @property
    def matched(self) -> bool:
        return not self._left and not self._other

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op: draws are replaced."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        source = _source(func, args, kwargs)
        key = None if source is None else _number(None)
        draw = self._made.get(key) if key is not None else None
        if draw is not None and draw.source == source:
            result = _replayed(func, bound(func, args, kwargs), draw.values)
            if result is not None:
                self._left.discard(key)
                return result
        self._other = True
        return func(*args, **kwargs)


def can_be_recorded(graph: fx.Graph) -> bool:
    """Whether every draw of a graph is one of those that eager code can be given."""
    return all(
        getattr(node.target, "overloadpacket", None) in _SOURCES
        for node in graph.nodes
        if node.op == "call_function" and is_random(node)
    )


def _number(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**62, (), generator=generator).item())


def _source(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The distribution of a draw; None where the op is no draw, or not one that is recorded."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    built = _SOURCES.get(func.overloadpacket)
    return None if built is None else built(bound(func, args, kwargs))


def _bernoulli(given: Given) -> tuple[Any, ...] | None:
    p = given.get("p")
    return ("mask", round(p, 12)) if isinstance(p, (int, float)) else None


def _native_dropout(given: Given) -> tuple[Any, ...] | None:
    return ("mask", round(1 - given["p"], 12)) if given["train"] is not False else None


def _uniform(given: Given) -> tuple[Any, ...]:
    return ("uniform", given.get("from", 0.0), given.get("to", 1.0))


def _normal(given: Given) -> tuple[Any, ...]:
    return ("normal", given.get("mean", 0.0), given.get("std", 1.0))


_SOURCES: dict[Any, Callable[[Given], tuple[Any, ...] | None]] = {
    aten.bernoulli: _bernoulli,
    aten.bernoulli_: _bernoulli,
    aten.native_dropout: _native_dropout,
    aten.rand: _uniform,
    aten.rand_like: _uniform,
    aten.uniform: _uniform,
    aten.uniform_: _uniform,
    aten.randn: _normal,
    aten.randn_like: _normal,
    aten.normal_: _normal,
    aten.normal_functional: _normal,
}


def _replayed(func: Any, given: Given, values: Tensor) -> Any:
    """What an op of eager code returns for recorded values; None where its shape is another one."""
    if func.overloadpacket is aten.native_dropout:
        x, p = given["input"], given["p"]
        if x.shape != values.shape:
            return None
        kept = values != 0
        return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept
    if "size" in given:
        same = tuple(given["size"]) == tuple(values.shape)
        return values.to(given.get("dtype") or torch.get_default_dtype()) if same else None
    like = given["self"]
    if like.shape != values.shape:
        return None
    if func._schema.is_mutable:
        return like.copy_(values)
    return values.to(given.get("dtype") or like.dtype, copy=True)
