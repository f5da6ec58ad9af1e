"""Observe which Python state a model's forward reads, by running it on tensors without data.

State that a forward writes and the next one reads (a counter), and random numbers that it draws
from Python's or NumPy's generators, would be constants in a graph, and are refused. A value that is
written once and unchanged in the next forward (a cache) is not state that a graph depends on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from graphaccel.capture.batch import ARGUMENTS, Batch, CallNumber
from graphaccel.capture.export.export import LossFn, export_forward, with_loss
from graphaccel.capture.export.reports import without_reports
from graphaccel.capture.export.watch import Copies
from graphaccel.capture.layers.runs import find_runs, shortened
from graphaccel.capture.state.carried import Ops, Path, kept_by, name_of, unread_of
from graphaccel.capture.state.closures import memory_of
from graphaccel.compat.torch.export import exporting
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.modules import conversions_checked
from graphaccel.compat.torch.tensors import version
from graphaccel.errors import DrawnOutside, GraphAccelError, StateFrozen
from graphaccel.errors.messages import Location
from graphaccel.guards.effects import output_dropped
from graphaccel.guards.lines import call_as_written, location
from graphaccel.guards.place import Place
from graphaccel.guards.places import objects_of, places
from graphaccel.guards.reads import Reads, is_library, kind_of, line_of, recorded
from graphaccel.guards.refusals import asks_outside, refuse_iterators
from graphaccel.guards.tokens import MISSING
from graphaccel.ir.replication.layers import KEPT

_UNLIKELY = 0x5EED_0FF0
"""A seed that no model sets: if the forward seeds the generator, its state differs from this
one."""
_COLLECTED = (
    "return what it collects, and collect it in the script:  return loss, value  "
    "# with graphaccel.optimize(model, optimizer, outputs='all')"
)
_CALLER = "graphaccel/runtime/module.py"
"""Where the call of an optimized model arrives."""


@dataclass(frozen=True)
class Observed:
    """What a forward read.

    written: names of places that the forward writes itself, the same each time. left: where it
    leaves a new tensor, or another value, in the model each time without reading it later.
    """

    reads: Reads = field(repr=False)
    written: frozenset[str]
    left: tuple[Path, ...] = ()


def observe(fresh: Callable[[], nn.Module], batch: Batch, loss_fn: LossFn, many: int) -> Observed:
    """Run the forward of a fake model on a fake batch and observe what it reads.

    fresh: returns the model, with its attributes as in the user's. many: from this number of
    identical layers on, only a few of them run.

    Raises:
        StateFrozen: the forward reads what an earlier one wrote, or seeds torch's generator
            (GA106), with the line.
        DrawnOutside: it draws from a generator of Python's or NumPy's (GA107), with the line.
    """
    with _generators_restored():
        model = _few(fresh(), many)
        called = (loss_fn,) if callable(loss_fn) else ()
        with recorded(objects_of(model, *called)) as reads, output_dropped(reads.note):
            ops = Ops()
            run = _run if _run(model, batch, loss_fn, ops) else _exported
            if run is _exported:
                _exported(model, batch, loss_fn, ops)
        if run is _run and reads.seeds:
            raise _seeds(model, reads.seeds[0])
        if reads.questions:
            raise asks_outside(f"{type(model).__name__}.forward", reads.questions[0])
        reads.copies.append(model)
        if called:
            reads.roots["loss_fn"] = loss_fn
        for leaf in batch.leaves:
            if isinstance(leaf, CallNumber):
                reads.roots[ARGUMENTS] = leaf.values
        result = places(model, reads)
        _refuse_left_outside(result, ops)
        refuse_iterators(result.values())
        model = _few(fresh(), many)
        reads.copies.append(model)
        watch = _Passes(model, reads, batch)
        ran = watch.ran(lambda ops: run(model, batch, loss_fn, ops))
        if watch.seeded:
            forward = partial(run, model, batch, loss_fn, Ops())
            torch.default_generator.manual_seed(_UNLIKELY)
            raise _seeds(model, _line_that_changes(torch.default_generator.initial_seed, forward))
        watch.refuse_written()
        if not ran:  # capture reports the reason
            return Observed(reads, frozenset())
        if watch.steady and not watch.keeps:
            return Observed(reads, frozenset(), unread_of(fresh(), reads))
        watch.ran(lambda ops: run(model, batch, loss_fn, ops))
        if watch.reads_kept:
            watch.ran(lambda ops: run(model, batch, loss_fn, ops))
            watch.refuse_carried()
        if watch.drew:
            line = _draw(partial(run, model, batch, loss_fn, Ops()), reads)
            raise DrawnOutside(
                module=f"{type(model).__name__}.forward", generator=watch.drew, location=line
            )
        return Observed(reads, watch.written(), unread_of(fresh(), reads, watch.left))


def _refuse_left_outside(result: Mapping[str, Place], ops: Ops) -> None:
    """Raises StateFrozen where the forward left a tensor that it computed outside of the model, and
    takes it away from there: it has no values."""
    left = [
        place
        for place in result.values()
        if place.shared
        and isinstance(place.value, torch.Tensor)
        and memory_of(place.value) in ops.computed
    ]
    for place in left:
        of_module = place.how == "dict" and "__name__" in place.holder
        place.put(MISSING if place.how == "dict" and not of_module else None)
    if left:
        name = left[0].name.partition("[")[0]
        raise StateFrozen(
            what=f"`{name}` is outside of the model, and the forward leaves a tensor there",
            location=location(left[0].line),
            reason="tensors have no values while the model is captured",
            help_lines=(
                f"hold it in the model:  self.{name.rpartition('.')[2]} = ...",
                "or in the cache of a function:  @functools.lru_cache(maxsize=None)",
            ),
        )


def _few(model: nn.Module, many: int) -> nn.Module:
    runs = find_runs(model, many)
    return shortened(model, dict.fromkeys(runs, KEPT)) if runs else model


def _run(model: nn.Module, batch: Batch, loss_fn: LossFn, ops: Ops) -> bool:
    """Run one forward; returns whether it runs without data, outside of export."""
    fake = next(p for p in nn.Module.parameters(model) if isinstance(p, FakeTensor)).fake_mode
    args, kwargs = batch.rebuild(batch.leaves)
    try:
        unchanged = conversions_checked(_refuse_conversion)
        with without_reports(), fake, exporting(), torch.enable_grad(), ops, Copies(), unchanged:
            with_loss(model, loss_fn)(*args, **kwargs)
    except Exception:  # whatever the model raises when it needs a value
        return False
    return True


def _refuse_conversion(module: nn.Module) -> None:
    """The copy's weights serve later captures too; export refuses such a forward with its line."""
    raise TypeError(f"{type(module).__name__} is converted")


def _exported(model: nn.Module, batch: Batch, loss_fn: LossFn, ops: Ops) -> bool:
    """Run one export, which can do more than a plain forward; returns whether it succeeds."""
    try:
        with ops:
            export_forward(model, batch, loss_fn)
    except GraphAccelError:  # capture raises it once more
        return False
    return True


@dataclass(frozen=True)
class _Pass:
    """The record of one forward: the places afterwards, the operators that ran, the parameters and
    buffers that it wrote, the generator states, and where modules hold tensors that it computed."""

    places: Mapping[str, Place]
    ops: Ops
    wrote: frozenset[str]
    generators: tuple[Any, ...]
    kept: Mapping[Path, int]


class _Passes:
    """Successive forwards of one model."""

    def __init__(self, model: nn.Module, reads: Reads, batch: Batch) -> None:
        self._model, self._reads, self._batch = model, reads, batch
        tensors = (*nn.Module.parameters(model), *model.buffers(), *batch.tensors.values())
        self._own = frozenset(map(memory_of, tensors))
        self._shapes = {name: tensor.shape for name, tensor in model.named_buffers()}
        result = places(model, reads)
        self._passes = [_Pass(result, Ops(), frozenset(), _states(result), {})]
        self.seeded = False

    def ran(self, forward: Callable[[Ops], bool]) -> bool:
        """Run one more forward; returns whether it ran."""
        ops, before = Ops(self._own, self._passes[-1].ops.computed), self._versions()
        torch.default_generator.manual_seed(_UNLIKELY)
        state = torch.random.get_rng_state()  # a forward on fakes does not advance it
        ran = forward(ops)
        self.seeded |= not torch.equal(state, torch.random.get_rng_state())
        after = self._versions()
        wrote = frozenset(n for n, number in after.items() if before.get(n) != number)
        result = places(self._model, self._reads)
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
    def left(self) -> tuple[Path, ...]:
        """Where the second forward left tensors too, which no other forward reads."""
        return tuple(self._passes[2].kept)

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
        attribute = name.rpartition(".")[2] if name else "state"
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
    def steady(self) -> bool:
        """Whether the last forward changed nothing."""
        return not self._changed(-1) and not self.drew

    @property
    def drew(self) -> str:
        """The generator that the last forward drew from; "" for none."""
        before, after = self._passes[-2].generators, self._passes[-1].generators
        names = ("Python's `random`", "NumPy's `random`")
        for i, (a, b) in enumerate(zip(before, after, strict=False)):
            if a != b:
                return names[i] if i < len(names) else "a generator of its own, outside of torch"
        return ""

    def written(self) -> frozenset[str]:
        """What the first forward wrote and the second did not change. Raises StateFrozen."""
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
        if not written:
            return frozenset()
        if first.wrote != second.wrote or (not cache and first.ops.names != second.ops.names):
            place = first.places[written[0]]
            raise StateFrozen(
                what=f"`{place.name}` makes the first forward another one than those after it",
                location=self._write_of(place),
                note="written by the forward that reads it",
                reason="every step runs the same graph",
                help_lines=(f"run one forward before graphaccel.optimize:  {self._call()}",),
            )
        return frozenset(written)

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


def _states(result: Mapping[str, Place]) -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, and of those that the forward reads."""
    own = [_state(p.value) for p in result.values()]
    return random.getstate(), _comparable(np.random.get_state()), *(s for s in own if s is not None)


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return _comparable(value.get_state())
    return (
        _comparable(value.bit_generator.state) if isinstance(value, np.random.Generator) else None
    )


def _comparable(state: Any) -> Any:
    """A comparable form of a NumPy generator's state."""
    if isinstance(state, dict):
        return tuple((k, _comparable(v)) for k, v in state.items())
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state


@contextmanager
def _generators_restored() -> Iterator[None]:
    python, numpy, own = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(own)
        random.setstate(python)
        np.random.set_state(numpy)


def _seeds(model: nn.Module, line: Location | None) -> StateFrozen:
    return StateFrozen(
        what=f"`{type(model).__name__}.forward` seeds torch's generator",
        location=line,
        note="a graph draws from the generator as it is",
        reason="what is drawn behind this line would be other numbers than in the script's model",
        help_lines=("seed in the script, before the call of the model:  torch.manual_seed(0)",),
    )


def _draw(forward: Callable[[], bool], reads: Reads) -> Location | None:
    """The line that draws: a recorded one of `random`, or the line after which NumPy's state
    differs."""
    if reads.draws:
        return reads.draws[0]
    result = _line_that_changes(lambda: _comparable(np.random.get_state()), forward)
    return result or line_of(None)


def _line_that_changes(read: Callable[[], Any], forward: Callable[[], bool]) -> Location | None:
    """The user's line after which a state differs from before it."""
    locations: list[Location] = []
    state = [read()]
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if is_library(frame.f_code.co_filename):
            return trace if event == "call" else None
        now = read()
        if now != state[0] and not locations and frame in last:
            locations.append(Location(frame.f_code.co_filename, last[frame]))
        state[0], last[frame] = now, frame.f_lineno
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        forward()
    finally:
        sys.settrace(before)
    return locations[0] if locations else None
