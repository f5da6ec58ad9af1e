"""Observe which Python state a model's forward reads, by running it on tensors without data.

State that a forward writes and the next one reads (a counter), and random numbers that it draws
from Python's or NumPy's generators, would be constants in a graph, and are refused. A value that is
written once and unchanged in the next forward (a cache) is not state that a graph depends on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as File
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from graphaccel.capture.batch import ARGUMENTS, Batch, CallNumber
from graphaccel.capture.export.buffer_values import buffers_answer
from graphaccel.capture.export.export import LossFn, export_forward, with_loss
from graphaccel.capture.export.reports import without_reports
from graphaccel.capture.export.watch import Copies
from graphaccel.capture.layers.runs import find_runs, shortened
from graphaccel.capture.state.carried import Ops, Path, unread_of
from graphaccel.capture.state.closures import memory_of
from graphaccel.capture.state.draws import decide_nothing, generators_restored
from graphaccel.capture.state.left import (
    changed_entries,
    entries_of,
    in_all_layers,
    leaves_of,
    left_outside,
    rewritten,
    written_argument,
)
from graphaccel.capture.state.rules import run_rules
from graphaccel.capture.state.successive import GENERATORS, UNLIKELY, Passes, comparable
from graphaccel.compat.torch.export import exporting
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.modules import conversions_checked
from graphaccel.errors import DrawnOutside, GraphAccelError, StateFrozen, Unsupported
from graphaccel.errors.messages import Location
from graphaccel.guards.effects import output_dropped
from graphaccel.guards.lines import location
from graphaccel.guards.place import Place
from graphaccel.guards.places import objects_of, places
from graphaccel.guards.reads import Reads, is_library, line_of, recorded
from graphaccel.guards.refusals import asks_outside, refuse_iterators, writes_to_argument
from graphaccel.guards.tokens import MISSING
from graphaccel.ir.replication.layers import KEPT
from graphaccel.progress import progress


@dataclass(frozen=True)
class Calls:
    """The operators of a forward, in order, and the numbers among their arguments.

    plain: leaf → value of what it returns besides tensors; None where it asks for values of
    tensors. leaves: how many leaves it returns.
    """

    names: tuple[Any, ...]
    numbers: tuple[int | float, ...]
    plain: Mapping[int, Any] | None = None
    leaves: int = 0


@dataclass(frozen=True)
class Observed:
    """What a forward read.

    written: names of places that the forward writes itself, the same each time. left: where it
    leaves a new tensor, or another value, each time without reading it later: paths in the model,
    and places outside of it. calls: the operators of a forward, in order; None where it needs
    values. filled: of `written`, what the first forward leaves for later ones: name → token before
    and behind it.
    """

    reads: Reads = field(repr=False)
    written: frozenset[str]
    left: tuple[Path | Place, ...] = ()
    calls: Calls | None = field(default=None, repr=False)
    filled: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def observe(fresh: Callable[[], nn.Module], batch: Batch, loss_fn: LossFn, many: int) -> Observed:
    """Run the forward of a fake model on a fake batch and observe what it reads.

    fresh: returns the model, with its attributes as in the user's. many: from this number of
    identical layers on, only a few of them run.

    Raises:
        StateFrozen: the forward reads what an earlier one wrote, or seeds torch's generator
            (GA106), with the line.
        Unsupported: it registers a parameter or buffer that was not there before (GA208).
        DrawnOutside: it draws from a generator of Python's or NumPy's (GA107), with the line.
    """
    with generators_restored():
        model = _few(fresh(), many)
        entries, registered = entries_of(model), _registered(model)
        called = (loss_fn,) if callable(loss_fn) else ()
        with recorded(objects_of(model, *called)) as reads, output_dropped(reads.note):
            ops = Ops()
            run = _run if _run(model, batch, loss_fn, ops) else _exported
            calls = _calls(ops) if run is _run else None
            if run is _exported:
                _exported(model, batch, loss_fn, ops)
            run_rules(model, reads, ops)
        _refuse_new(_registered(model) - registered)
        if run is _run and reads.seeds:
            raise _seeds(model, reads.seeds[0])
        entered = changed_entries(entries, entries_of(model))
        if ops.argument:
            raise writes_to_argument(ops.argument, _line_that_writes(model, batch, loss_fn))
        if reads.questions:
            raise asks_outside(f"{type(model).__name__}.forward", reads.questions[0])
        reads.copies.append(model)
        reads.roots |= {"loss_fn": loss_fn} if called else {}
        reads.roots.update((ARGUMENTS, n.values) for n in batch.leaves if isinstance(n, CallNumber))
        read = places(model, reads)
        _refuse_left_outside(read, ops)
        refuse_iterators(read.values())
        model = _few(fresh(), many)
        reads.copies.append(model)
        watch = Passes(model, reads, batch)
        forward = partial(run, model, batch, loss_fn)
        ran = watch.run(forward)
        if watch.seeded:
            once = partial(forward, Ops())
            torch.default_generator.manual_seed(UNLIKELY)
            raise _seeds(model, _line_that_changes(torch.default_generator.initial_seed, once))
        watch.refuse_written()
        if not ran:  # capture reports the reason
            return Observed(reads, frozenset())
        if watch.unchanged and not watch.keeps and not entered:
            result = _observed(watch, reads, frozenset(), forward, model, fresh, ())
            return replace(result, calls=calls)
        watch.run(forward)
        if watch.reads_kept:
            watch.run(forward)
            watch.refuse_carried()
        _refuse_drawn(watch, forward, type(model), reads)
        result = _observed(watch, reads, watch.written(), forward, model, fresh, entered)
        return replace(result, calls=calls)


def calls_of(model: nn.Module, batch: Batch, loss_fn: LossFn, many: int) -> Calls | None:
    """What the forward of a fake model calls on a fake batch; None where it needs values. many: as
    in `observe`."""
    ops = Ops()
    with generators_restored(), output_dropped():
        ran = _run(_few(model, many), batch, loss_fn, ops)
    return _calls(ops) if ran else None


def _calls(ops: Ops) -> Calls:
    plain, leaves = ops.besides
    return Calls(tuple(ops.names), tuple(ops.numbers), None if ops.asked else plain, leaves)


def _refuse_drawn(watch: Passes, forward: Callable[[Ops], bool], kind: type, reads: Reads) -> None:
    """Raises DrawnOutside for a draw that the last forward made, unless its value decides nothing:
    that is left out, and said."""
    drawn = watch.drew
    if not drawn:
        return
    once = partial(forward, Ops())
    line = _draw(once, reads)
    if GENERATORS[-1] in drawn or not decide_nothing(once):
        raise DrawnOutside(module=f"{kind.__name__}.forward", generator=drawn[0], location=line)
    where = "" if line is None else f", {File(line.file).name}:{line.line}"
    progress("left out", f"draws from {drawn[0]} that decide nothing{where}", 0.0)


def _registered(model: nn.Module) -> set[str]:
    """Names of parameters, and of buffers, also of those that are None until a forward makes
    them."""
    buffers = {f"{n}.{k}" if n else k for n, m in model.named_modules() for k in m._buffers}
    return buffers.union(name for name, _ in model.named_parameters())


def _refuse_new(names: set[str]) -> None:
    """Raises Unsupported (GA208) where a forward registers these."""
    if names:
        raise Unsupported(
            what=f"`{min(names)}`, which the first forward makes,",
            reason="the plan places, and the optimizer steps, what the model has before it",
            help_line="model(batch)  # once, before the optimizer is made and optimize() is called",
        )


def _observed(
    watch: Passes,
    reads: Reads,
    written: frozenset[str],
    forward: Callable[[Ops], bool],
    model: nn.Module,
    fresh: Callable[[], nn.Module],
    entered: Sequence[Path],
) -> Observed:
    """entered: entries of containers and objects of the model that a forward has changed."""
    paths = rewritten(model, entered, forward)
    outside = left_outside(watch.places, forward) if watch.asked else []
    filled = watch.filled(written, forward) if written else {}
    whole = fresh()
    kept = in_all_layers((*watch.left, *paths), model, whole)
    written |= {place.name for place in outside}
    return Observed(reads, written, (*unread_of(whole, reads, kept), *outside), filled=filled)


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
    args, kwargs = batch.rebuild(batch.leaves)
    before = leaves_of(args, kwargs)
    ran = _called(model, loss_fn, args, kwargs, ops)
    ops.argument = written_argument(args, kwargs, before)
    return ran


def _called(model: nn.Module, loss_fn: LossFn, args: Any, kwargs: Any, ops: Ops) -> bool:
    fake = next(p for p in nn.Module.parameters(model) if isinstance(p, FakeTensor)).fake_mode
    try:
        unchanged = conversions_checked(_refuse_conversion)
        copies, answers = Copies(), buffers_answer(model)
        with (
            without_reports(),
            fake,
            exporting(),
            torch.enable_grad(),
            ops,
            copies,
            unchanged,
            answers,
        ):
            ops.returned = with_loss(model, loss_fn, ops.note)(*args, **kwargs)
        ops.hooked = copies.hooked
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
    result = _line_that_changes(lambda: comparable(np.random.get_state()), forward)
    return result or line_of(None)


def _line_that_writes(model: nn.Module, batch: Batch, loss_fn: LossFn) -> Location | None:
    """The line that puts something into a container of the call."""
    args, kwargs = batch.rebuild(batch.leaves)
    read = partial(leaves_of, args, kwargs)
    return _line_that_changes(read, partial(_called, model, loss_fn, args, kwargs, Ops()))


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
