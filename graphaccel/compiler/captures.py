"""Cache of a model's captured steps, by batch signature and the Python state they depend on."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.batch_dims import given_dims
from graphaccel.capture.evaluation import evaluation_step
from graphaccel.capture.export.buffer_values import asked_buffers, buffers_of
from graphaccel.capture.export.export import export_forward
from graphaccel.capture.export.weights import layout_of
from graphaccel.capture.state.caches import caches_of, forget_traced
from graphaccel.capture.state.carried import Path
from graphaccel.capture.state.numbers import same_but_numbers
from graphaccel.capture.state.observe import Calls, Observed, calls_of, observe
from graphaccel.capture.stepgraph import MANY, StepGraph, capture, trained_names
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compiler.calls_by_size import CallsBySize, resized_to
from graphaccel.compiler.capture_apart import capture_apart
from graphaccel.compiler.capture_context import without_autocast
from graphaccel.compiler.fitting import same_values, sizes_for
from graphaccel.compiler.input_checks import refuse_empty, refuse_untrained
from graphaccel.compiler.model import Model, fake_mode, follow_attributes, without_data
from graphaccel.errors import GraphAccelError, StateFrozen
from graphaccel.garbage import no_collections
from graphaccel.guards.effects import effect_text
from graphaccel.guards.guards import Guards
from graphaccel.guards.numbers import named_as_inputs
from graphaccel.guards.place import Place
from graphaccel.guards.places import places
from graphaccel.guards.refusals import too_many, too_many_values
from graphaccel.guards.system import Question
from graphaccel.progress import progress, running

MOST = 8
"""Most captures for one batch signature that differ in Python values only."""
MOST_VALUES = 3
"""The same where a buffer's values differ."""
ALL = sys.maxsize
"""A number of equal layers that no model has: all of them run."""


@dataclass(frozen=True)
class _Kept:
    """A step, what it depends on besides its batch, and where its forward leaves values."""

    step: StepGraph
    guards: Guards
    left: tuple[Path | Place, ...]


class Captures:
    """Captures a model when a batch needs it, and caches the captured steps.

    steps: (signature of the batch, training, number) → step. capturing: whether one is running.
    splits: whether a step can be split over its batch, where a plan may want to. asked: buffers
    whose values the forward asks for, with what they were.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.capturing = model, False
        self.steps: dict[Any, StepGraph] = {}
        self.splits: Callable[[StepGraph], bool] | None = None
        self._skeleton: nn.Module | None = None
        self._kept: dict[int, _Kept] = {}
        self._fixed: set[str] = set()  # numbers that cannot be inputs
        self._calls = CallsBySize(self._called)
        self._said: set[Question] = set()
        self.asked: dict[str, torch.Tensor] = {}

    def of(
        self, batch: Batch, *, training: bool = True, fixed: bool = False
    ) -> tuple[StepGraph, dict]:
        """The step for a batch and the current Python state, and the values of the step's symbolic
        sizes for that batch.

        fixed: the first step in evaluation mode need not serve other sizes than the batch's, which
        takes a third of the time; the next one then does.

        Raises what capturing raises, and StateFrozen (GA106) where a value that cannot be an input
        already had MOST other values.
        """
        refuse_empty(batch, first=not self.steps)
        others = []
        for step, sizes in self._fitting_steps(batch, training):
            if self._serves(step, batch):
                return step, sizes
            if not self.guards(step, batch).hold():
                others.append(step)
        start = time.perf_counter()
        fixed = fixed and not training and all(step.training for step in self.steps.values())
        with running("capture"):
            step = self._captured(batch, training, others, symbolic=not fixed)
        progress("capture", f"{step.nodes:,} ops", time.perf_counter() - start)
        return step, step.sizes_of(batch)

    def skeleton(self, *, training: bool = True) -> nn.Module:
        """The model without data, with the current Python attributes of the user's."""
        return self._fresh(training)

    def knows(self, batch: Batch, *, training: bool = True) -> bool:
        """Whether a step for this batch and the current Python state is cached."""
        return any(self._serves(step, batch) for step, _ in self._fitting_steps(batch, training))

    def keep(self, batch: Batch, step: StepGraph) -> None:
        """Use another rank's capture of the training step of this batch."""
        if self._skeleton is None:  # now: later the model has shards and placeholders
            self._skeleton = without_data(self.model.module)
        self.steps[(batch.signature(), step.training, len(self.steps))] = step
        self.guards(step, batch)

    def guards(self, step: StepGraph, batch: Batch) -> Guards:
        """What a step depends on besides its batch; for a step captured elsewhere, the current
        values."""
        kept = self._kept.get(id(step))
        if kept is None:
            observed = self._observed(batch, step.training)
            recorded = self._recorded(step.training, observed)
            kept = self._guarded(step, batch, observed, recorded)
        return kept.guards

    def left(self, step: StepGraph) -> tuple[Path | Place, ...]:
        """Where the forward of a step leaves values for the script, which its graph does not."""
        kept = self._kept.get(id(step))
        return () if kept is None else kept.left

    def returned(self, step: StepGraph, batch: Batch) -> Mapping[int, Any]:
        """What a step that serves a batch returns of it besides tensors: leaf → value."""
        return self._calls.returned(step, batch)

    def with_numbers(self, step: StepGraph, batch: Batch) -> Batch:
        """The batch, followed by the current values of the model's numbers that are inputs of a
        step."""
        guards = self.guards(step, batch)
        if not guards.numbers or not guards.hold():
            return batch
        numbers = [torch.tensor(n, dtype=torch.float64) for n in guards.numbers_now()]
        names = (*batch.names, *guards.numbers)
        return replace(batch, leaves=(*batch.leaves, *numbers), names=names)

    def state_digest(
        self, batch: Batch, *, training: bool = True, trained: frozenset[str] | None = None
    ) -> str:
        """Digest of the current Python values that the step of a batch depends on: equal on ranks
        that will run the same step. "" before the first capture. trained: `trained_names` now."""
        latest = None
        for step, _ in self._fitting_steps(batch, training, trained):
            latest = latest or self.guards(step, batch)
            if self._serves(step, batch):
                return repr((step.fingerprint, self.guards(step, batch).numbers_now()))
        changes = () if latest is None else latest.changes()
        return repr(sorted((c.place.name, c.now) for c in changes)) if changes else ""

    def _fitting_steps(
        self, batch: Batch, training: bool, trained: frozenset[str] | None = None
    ) -> list[tuple[StepGraph, dict]]:
        """Steps that fit the batch's signature and train what is trained now, the latest first."""
        if trained is None:
            trained = trained_names(self.model.module) if training else frozenset()
        results = []
        for (signature, *_), step in reversed(self.steps.items()):
            sizes = sizes_for(step, batch, training)
            fits = sizes is not None and (not training or trained <= step.trainable)
            if fits and same_values(signature, batch.signature()):
                results.append((step, sizes))
        return results

    def _captured(
        self, batch: Batch, training: bool, others: Sequence[StepGraph], *, symbolic: bool
    ) -> StepGraph:
        """Capture anew. others: cached steps that only the current Python state rules out."""
        derived = None if training or others else self._derived(batch, symbolic=symbolic)
        if derived is not None:
            return derived
        if others:
            self._refuse_other_modules(self._kept[id(others[0])].guards)
        observed = self._observed(batch, training)
        numbers = self._inputs(batch, training, others[0], observed) if others else ()
        self._refuse_values(others)
        if not numbers:
            self._refuse_more(others)
        faked = self._faked(batch, training, observed, numbers)
        many = None if numbers or self.asked else MANY
        step = self._capture(*faked, training, many=many, symbolic=symbolic)
        return self._noted(step, batch, observed, numbers)

    def _noted(
        self, step: StepGraph, batch: Batch, observed: Observed, numbers: Sequence[str] = ()
    ) -> StepGraph:
        """The step as it is cached, with what it depends on."""
        recorded = self._recorded(step.training, observed)
        step = _with_paths(step, recorded)
        self._guarded(step, batch, observed, recorded, numbers)
        self.steps[(batch.signature(), step.training, len(self.steps))] = step
        return step

    def _derived(self, batch: Batch, *, symbolic: bool = True) -> StepGraph | None:
        """The evaluation step that a captured training step becomes; None where that does not tell
        what this batch needs."""
        for step, sizes in self._fitting_steps(batch, True, frozenset()):
            guards = self.guards(step, batch)
            same = guards.hold() or all(c.place.key == "training" for c in guards.changes())
            if not same or guards.numbers or self.asked:
                continue
            at = resized_to(step, batch, step.sizes)
            observed = self._observed(at, training=False)
            with self._capturing():
                built, various = partial(self._faked, at), symbolic or sizes != step.sizes
                derived = evaluation_step(step, built, self.model.loss_fn, symbolic=various)
            if derived is not None:
                derived = self._noted(derived, at, observed)
                return derived if self._serves(derived, batch) else None
        return None

    def _serves(self, step: StepGraph, batch: Batch) -> bool:
        guards = self.guards(step, batch)
        return guards.hold() and self._calls.hold(step, batch, guards.numbers_now())

    def _called(self, batch: Batch, training: bool) -> Calls | None:
        model, built = self._faked(batch, training)
        with self._capturing():
            return calls_of(model, built, self.model.loss_fn, ALL if self.asked else MANY)

    def _inputs(
        self, batch: Batch, training: bool, before: StepGraph, observed: Observed
    ) -> tuple[str, ...]:
        """The numbers that become inputs of the next capture: those that differ from another
        capture's, and its own, where a tensor can replace them."""
        guards = self._kept[id(before)].guards
        changed = [c.place.name for c in guards.changes() if c.place.is_number]
        names = [n for n in dict.fromkeys((*guards.numbers, *changed)) if n not in self._fixed]
        rules = observed.reads.read_by_rules  # their own ops are traced without the inputs
        names = [n for n in names if rules.isdisjoint(re.split(r"\W+", n))]
        if not names or self._stands_for(batch, training, observed, names):
            return tuple(names)
        able = [n for n in names if self._stands_for(batch, training, observed, [n])]
        self._fixed |= {*names} - {*able}
        return tuple(able)

    def _stands_for(
        self, batch: Batch, training: bool, observed: Observed, names: Sequence[str]
    ) -> bool:
        """Whether a forward with tensors in place of numbers computes the same as with numbers."""
        graphs = []
        for numbers in (names, ()):
            model, built = self._faked(batch, training, observed, numbers)
            try:
                with self._capturing():
                    graphs.append(export_forward(model, built, self.model.loss_fn))
            except GraphAccelError:
                return False
        return same_but_numbers(graphs[1], graphs[0], set(names))

    def _refuse_other_modules(self, guards: Guards) -> None:
        """Raises StateFrozen (GA106) where a submodule has another class than at capture."""
        assert self._skeleton is not None
        known = dict(self._skeleton.named_modules())
        for change in guards.changes():
            if change.place.name in known:
                raise StateFrozen(
                    what=f"submodule `{change.place.name}` is another one than when the step was "
                    "captured",
                    reason="the plan and the optimizer hold parts of the model as it was",
                    help_lines=("replace modules before graphaccel.optimize(model, optimizer)",),
                )

    def _refuse_values(self, others: Sequence[StepGraph]) -> None:
        """Raises StateFrozen (GA106) for a buffer that has other values again and again."""
        changes = self._kept[id(others[0])].guards.changes() if others else ()
        change = next((c for c in changes if c.place.how == "values"), None)
        if change is not None and len(others) >= MOST_VALUES:
            raise too_many_values(change)

    def _refuse_more(self, others: Sequence[StepGraph]) -> None:
        """Raises StateFrozen (GA106) where too many captures differ in Python values."""
        if len(others) < MOST:
            return
        change = self._kept[id(others[0])].guards.changes()[0]
        raise too_many(change, MOST)

    def _capture(
        self, model: nn.Module, built: Batch, training: bool, *, many: int | None, symbolic: bool
    ) -> StepGraph:
        given = self.given_dims(built)
        splits = self.splits if training else None
        # Each costs captures at further sizes: two may vary once one capture did not do.
        lengths = 1 + any(step.training == training for step in self.steps.values())

        def captured(batch: Batch) -> StepGraph:
            sizes = {"symbolic": symbolic, "lengths": lengths, "batch_dims": given}
            return capture(model, batch, self.model.loss_fn, many=many, splits=splits, **sizes)

        with self._capturing():
            step = capture_apart(captured, built, given) if symbolic else captured(built)
        if step.has_loss and training:
            refuse_untrained(step)
        return step

    def _observed(self, batch: Batch, training: bool) -> Observed:
        built, known = self._faked(batch, training)[1], bool(self.asked)
        with self._capturing():
            fresh, loss_fn = partial(self._fresh, training), self.model.loss_fn
            observed = observe(fresh, built, loss_fn, ALL if self.asked else MANY)
        if self.asked and not known:  # each of many equal layers has a buffer of its own
            return self._observed(batch, training)
        for effect in observed.reads.effects:
            if effect not in self._said:
                self._said.add(effect)
                progress("note", effect_text(type(self.model.module), effect), 0.0)
        return observed

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self.capturing = True
        try:
            values = buffers_of(self.model.module, self.asked)
            with torch.enable_grad(), no_collections(), without_autocast(), values:
                yield
        finally:
            self.capturing = False
            if self._skeleton is not None:
                forget_traced(caches_of(self._skeleton))

    def _recorded(self, training: bool, observed: Observed) -> dict[str, Place]:
        """What the forward reads, with gradients on as in its capture."""
        with torch.enable_grad():
            return places(self._fresh(training), observed.reads, self.model.module)

    def _guarded(
        self,
        step: StepGraph,
        batch: Batch,
        observed: Observed,
        recorded: Mapping[str, Place],
        numbers: Sequence[str] | None = None,
    ) -> _Kept:
        """Record what a step depends on. recorded: what its forward reads, at capture."""
        reads = observed.reads
        if numbers is None:  # step of another rank: the inputs after those of the batch
            numbers = _numbers(step, batch)
        values = {n: p.token for n, p in asked_buffers(self.model.module, self.asked, {}).items()}
        guards = Guards(
            lambda: (
                places(self.model.module, reads) | asked_buffers(self.model.module, values, values)
            ),
            {n: p.token for n, p in recorded.items()} | values,
            numbers=tuple(numbers),
            written=observed.written,
            filled=observed.filled,
            tensors=_constants(step, recorded),
        )
        guards.watch_content(recorded)
        self._calls.note(step, batch, observed.calls)
        self._kept[id(step)] = kept = _Kept(step, guards, observed.left)
        return kept

    def _fresh(self, training: bool) -> nn.Module:
        """The model without data, with the current Python attributes of the user's."""
        if self._skeleton is None:
            self._skeleton = without_data(self.model.module)
        else:
            follow_attributes(self._skeleton, self.model.module)
        if self._skeleton.training != training:
            self._skeleton.train(training)
        return self._skeleton

    def _faked(
        self,
        batch: Batch,
        training: bool,
        observed: Observed | None = None,
        numbers: Sequence[str] = (),
    ) -> tuple[nn.Module, Batch]:
        """The model and a batch without data, so that capture does not change the user's own.

        numbers: names of places that become leaves after those of the batch.
        """
        model = self._fresh(training)
        with fake_mode(model):
            leaves = tuple(
                torch.empty(
                    x.shape, dtype=x.dtype, device=_real(x.device), requires_grad=x.requires_grad
                )
                if isinstance(x, torch.Tensor)
                else x
                for x in batch.leaves
            )
            state = tuple(torch.empty((), dtype=torch.float64) for _ in numbers)
        put = None
        if observed is not None and numbers:
            put = partial(named_as_inputs, model, observed.reads, tuple(numbers))
        names = (*batch.names, *numbers)
        return model, replace(batch, leaves=(*leaves, *state), names=names, numbers=put)

    def given_dims(self, batch: Batch) -> dict[int, int] | None:
        """Leaf → its batch dim, where the user gave it. Raises GraphMisuse (GA407)."""
        said = self.model.batch_dims
        return None if said is None else given_dims(batch, said, self.model.module.forward)


def _numbers(step: StepGraph, batch: Batch) -> tuple[str, ...]:
    """The inputs of a step after the leaves of its batch."""
    count = len(batch.leaves)
    state = {s.leaf: s.name for s in step.inputs if s.kind == "batch" and s.leaf >= count}
    return tuple(state[leaf] for leaf in sorted(state))


def _constants(step: StepGraph, recorded: Mapping[str, Place]) -> dict[str, str]:
    """Place of a tensor → the constant of a step's graph that holds its values."""
    tensors = {n: p.value for n, p in recorded.items() if isinstance(p.value, torch.Tensor)}
    known = {id(constant): name for name, constant in step.forward.constants.items()}
    held = {path: name for name, path in step.forward.attributes.items()}
    for name, tensor in tensors.items():
        if _path(name) in held:
            known[id(tensor)] = held[_path(name)]
    return {n: known[id(t)] for n, t in tensors.items() if id(t) in known}


def _with_paths(step: StepGraph, recorded: Mapping[str, Place]) -> StepGraph:
    """The step, with the places of constants that the model does not hold (a loss function does, a
    global): for other ranks, whose tensors are different objects."""
    laid = {layout_of(constant): name for name, constant in step.forward.constants.items()}
    attributes = dict(step.forward.attributes)
    for name, place in recorded.items():
        tensor = place.value
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            constant = laid.get(layout_of(tensor))
            if constant is not None:
                attributes.setdefault(constant, _path(name))
    return replace(step, forward=replace(step.forward, attributes=attributes))


def _path(name: str) -> str:
    """The name of a place, as an attribute name in a captured forward."""
    return re.sub(r"\['?(.*?)'?\]", r".\1", name)


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
