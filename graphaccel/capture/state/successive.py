"""Successive forwards of one model, compared: what one leaves that the next one reads."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.state.carried import Ops, Path, kept_by, name_of
from graphaccel.capture.state.closures import memory_of
from graphaccel.capture.state.left import Forward, Unusable
from graphaccel.compat.torch.tensors import version
from graphaccel.errors import StateFrozen
from graphaccel.errors.messages import Location
from graphaccel.guards.lines import call_as_written, location
from graphaccel.guards.place import Place
from graphaccel.guards.places import places
from graphaccel.guards.reads import Reads, kind_of
from graphaccel.guards.tokens import MISSING, SCALARS

UNLIKELY = 0x5EED_0FF0
"""A seed that no model sets: if the forward seeds the generator, its state differs from this
one."""
_COLLECTED = (
    "return what it collects, and collect it in the script:  return loss, value  "
    "# with graphaccel.optimize(model, optimizer, outputs='all')"
)
GENERATORS = ("Python's `random`", "NumPy's `random`", "a generator of its own, outside of torch")
_CALLER = "graphaccel/runtime/module.py"
"""Where the call of an optimized model arrives."""


@dataclass(frozen=True)
class _Pass:
    """The record of one forward: the places afterwards, the operators that ran, the parameters and
    buffers that it wrote, the generator states, and where modules hold tensors that it computed."""

    places: Mapping[str, Place]
    ops: Ops
    wrote: frozenset[str]
    generators: tuple[Any, ...]
    kept: Mapping[Path, int]


class Passes:
    """Successive forwards of one model."""

    def __init__(self, model: nn.Module, reads: Reads, batch: Batch) -> None:
        self._model, self._reads, self._batch = model, reads, batch
        tensors = (*nn.Module.parameters(model), *model.buffers(), *batch.tensors.values())
        self._own = frozenset(map(memory_of, tensors))
        self._shapes = {name: tensor.shape for name, tensor in model.named_buffers()}
        result = self.places()
        self._passes = [_Pass(result, Ops(), frozenset(), _states(result), {})]
        self.seeded = False

    def run(self, forward: Callable[[Ops], bool]) -> bool:
        """Run one more forward; returns whether it ran."""
        ops, before = Ops(self._own, self._passes[-1].ops.computed), self._versions()
        torch.default_generator.manual_seed(UNLIKELY)
        state = torch.random.get_rng_state()  # a forward on fakes does not advance it
        ran = forward(ops)
        self.seeded |= not torch.equal(state, torch.random.get_rng_state())
        after = self._versions()
        wrote = frozenset(n for n, number in after.items() if before.get(n) != number)
        result = self.places()
        kept = kept_by(self._model, ops.computed, self._model_buffers())
        self._passes.append(_Pass(result, ops, wrote, _states(result), kept))
        return ran

    @property
    def keeps(self) -> bool:
        """Whether modules hold tensors that the last forward computed."""
        return bool(self._passes[-1].kept)

    @property
    def reads_kept(self) -> bool:
        """Whether the last forward read what the one before it computed."""
        return bool(self._passes[-1].ops.read)

    @property
    def asked(self) -> bool:
        """Whether the last forward asked for values of tensors."""
        return bool(self._passes[-1].ops.asked)

    def places(self) -> Mapping[str, Place]:
        """The places as they are now."""
        result = places(self._model, self._reads)
        for place in result.values():
            _ = place.token  # a container changes in place
        return result

    @property
    def left(self) -> tuple[Path, ...]:
        """Where the second forward left tensors too, which no other forward reads."""
        return tuple(self._passes[2].kept) if len(self._passes) > 2 else ()

    def refuse_written(self) -> None:
        """Raises StateFrozen for a tensor attribute that the forward writes in place."""
        for key, line in self._passes[-1].ops.written.items():
            name = name_of(self._model, key)
            if name:
                raise self._carried(name, line, None)

    def refuse_carried(self) -> None:
        """Raises StateFrozen where each forward reads a tensor that the one before it computed."""
        buffers = dict(self._model.named_buffers())
        for name in sorted(self._passes[-1].wrote & (buffers.keys() - self._model_buffers())):
            path, _, attribute = name.rpartition(".")
            kind = kind_of(type(self._model.get_submodule(path)))
            line = self._reads.written.get(kind, {}).get(attribute)
            raise self._carried(name, line, buffers[name])
        ops = self._passes[-1].ops
        for key, line in ops.read.items():
            paths = [p for p, k in self._passes[-2].kept.items() if k == key]
            raise self._carried(".".join(paths[0]) if paths else "", line, ops.before[key])

    def _carried(
        self, name: str, line: Location | None, tensor: torch.Tensor | None
    ) -> StateFrozen:
        attribute = _buffer_name(name)
        sizes = "()" if tensor is None else ", ".join(map(str, tensor.shape)) or "()"
        size = f"torch.zeros({sizes})" if tensor is not None else f"self.{attribute}"
        return StateFrozen(
            what=f"`{name}` is a tensor that each forward leaves for the next one"
            if name
            else "a tensor that one forward makes is read by the next one",
            location=location(line),
            note="read here" if tensor is not None else "written here",
            reason="a graph has the values of its capture there, in every step",
            help_lines=(
                f"hold it in a buffer:  self.register_buffer('{attribute}', {size})",
                "or give it to the forward as an input, and return its new value "
                "(with loss_fn='outside')",
            ),
        )

    @property
    def unchanged(self) -> bool:
        """Whether the last forward changed nothing."""
        return not self._changed(-1) and not self.drew

    @property
    def drew(self) -> list[str]:
        """The generators that the last forward drew from."""
        before, after = self._passes[-2].generators, self._passes[-1].generators
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        return [GENERATORS[min(i, len(GENERATORS) - 1)] for i in changed]

    def written(self) -> frozenset[str]:
        """What the first forward wrote or took away, and the second did not change. Raises
        StateFrozen."""
        changed = self._changed(-1)
        if changed:
            raise self._counter(changed[0])
        first, second = self._passes[1:3]
        written = self._changed(1)
        cache = any(
            isinstance(first.places[n].value, torch.Tensor)
            for n in first.places
            if n not in self._passes[0].places or n in written
        )
        gone = self._passes[0].places.keys() - first.places.keys()
        if not written:
            return frozenset(gone)
        if first.wrote != second.wrote or (not cache and first.ops.names != second.ops.names):
            place = first.places[written[0]]
            raise StateFrozen(
                what=f"`{place.name}` makes the first forward another one than those after it",
                location=self._write_of(place),
                note="written by the forward that reads it",
                reason="every step runs the same graph",
                help_lines=(f"run one forward before graphaccel.optimize:  {self._call()}",),
            )
        return frozenset((*written, *gone))

    def filled(self, written: Collection[str], forward: Forward) -> dict[str, tuple[Any, Any]]:
        """Of what the first forward wrote, plain values that others read, and the containers that
        it put them in: name → what was there before it, and behind it. A script may put another
        value there. None beside a cache of tensors, which they describe."""
        before, after = self._passes[0].places, self.places()
        places = [after[name] for name in written if name in after]
        if any(isinstance(p.value, torch.Tensor) for p in places):
            return {}
        tried = [p for p in places if isinstance(p.value, SCALARS) and p.how in ("dict", "item")]
        names = self._passes[-1].ops.names
        if not tried or not _reads(tried, forward, names):
            return {}
        read = [place.name for place in tried if _reads([place], forward, names)]
        inside = [n for n in written if any(name.startswith(f"{n}[") for name in read)]
        return {
            name: (before[name].token if name in before else MISSING, after[name].token)
            for name in (*read, *(n for n in inside if n in after))
        }

    def _call(self) -> str:
        args, kwargs = self._batch.rebuild(self._batch.leaves)
        return call_as_written(_CALLER, args, kwargs)

    def _changed(self, last: int) -> list[str]:
        last %= len(self._passes)
        before, after = self._passes[last - 1].places, self._passes[last].places
        return [n for n, p in after.items() if n not in before or p.token != before[n].token]

    def _counter(self, name: str) -> StateFrozen:
        place = self._passes[-1].places[name]
        attribute = name.rpartition(".")[2]
        helps = (
            f"count in a buffer:  self.register_buffer('{attribute}', torch.zeros(()))",
            f"or set it from the script, before each step:  model.{name} = step",
        )
        if isinstance(place.value, (Mapping, Sequence, set)):
            helps = (_COLLECTED,)
        outside = "hold it in the model, and set it from the script before each step"
        return StateFrozen(
            what=f"`{name}` changes in every forward, which also reads it",
            location=self._write_of(place),
            note="a graph would keep the value of its capture",
            reason="the script's own model does not run: its graph does, and that knows no Python",
            help_lines=(outside,) if place.shared and _COLLECTED not in helps else helps,
        )

    def _write_of(self, place: Place) -> Location | None:
        path, _, name = place.name.rpartition(".")
        try:
            holder = self._model.get_submodule(path)
        except AttributeError:
            return location(place.line, writes=True)
        written = self._reads.written.get(kind_of(type(holder)), {})
        return location(written.get(name) or place.line, writes=True)

    def _model_buffers(self) -> set[str]:
        """Names of the buffers that are those of before the forwards, in their shape."""
        named = self._model.named_buffers()
        return {name for name, tensor in named if self._shapes.get(name) == tensor.shape}

    def _versions(self) -> dict[str, int]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: version(tensor) for name, tensor in named}


def _reads(tried: Sequence[Place], forward: Forward, names: Sequence[str]) -> bool:
    """Whether a forward is another one with unusable objects at these places. names: of the
    operators that it runs."""
    ops = Ops()
    for place in tried:
        place.put(Unusable())
    try:
        return not forward(ops) or ops.names != names
    finally:
        for place in tried:
            place.put(place.value)


def _states(result: Mapping[str, Place]) -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, and of those that the forward reads."""
    own = [_state(p.value) for p in result.values()]
    return random.getstate(), comparable(np.random.get_state()), *(s for s in own if s is not None)


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return comparable(value.get_state())
    return comparable(value.bit_generator.state) if isinstance(value, np.random.Generator) else None


def comparable(state: Any) -> Any:
    """A comparable form of a NumPy generator's state."""
    if isinstance(state, dict):
        return tuple((k, comparable(v)) for k, v in state.items())
    if isinstance(state, tuple):
        return tuple(map(comparable, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _buffer_name(path: str) -> str:
    """What a buffer for the tensor at `path` may be called: `hidden.0`, of a tuple, is no name."""
    inner, _, last = path.rpartition(".")
    if last.isidentifier() or not path:
        return last or "state"
    return f"{_buffer_name(inner)}_{re.sub(r'[^0-9a-zA-Z]+', '_', last)}"
