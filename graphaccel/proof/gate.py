"""First training step: compares captured graph with eager, and the plan's step with the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch.tensors import version
from graphaccel.ir.program import StepProgram
from graphaccel.planner.plan.plan import Plan
from graphaccel.progress import progress
from graphaccel.proof.comparison import Pair
from graphaccel.proof.first_step import prove_together
from graphaccel.proof.planned import Expected, Given, Part, expect_together, parts_of
from graphaccel.proof.results import Results
from graphaccel.proof.rounding import rounding_together
from graphaccel.runtime.execution.answers import from_all
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import local_of

MORE = 3
"""Further steps that are compared after one whose values prove nothing."""
_SHARDS = "since the first step weights are shards, or on the host"
_OVERFLOW = "its gradients overflowed in fp16"


@dataclass(frozen=True)
class Now:
    """A training step that is about to run. whole: whether this rank holds every parameter in full.
    step: what was captured for this batch. pair: the model beside it, on gathered weights where
    they are not whole, or why there is none; a collective."""

    batch: Batch
    whole: bool
    step: Callable[[], StepGraph]
    pair: Callable[[], Pair | str]
    plan: Plan
    program: StepProgram
    mesh: Mesh


@dataclass
class _Reference:
    """What one device computes for a batch, or why that is not known.

    trial: runs a step under the plan on that batch (constant draws or not) and returns its parts;
    None where gradients overflowed. weights: identities and versions at the time of the reference.
    """

    expected: Expected | str
    batch: Batch
    trial: Callable[[bool], Mapping[str, Part] | None] = field(repr=False)
    example: bool = False
    weights: Any = field(default=None, repr=False)


class Gate:
    """Closed until a first step has been compared. proving: whether the user's own model is
    running.

    on: whether anything is compared at all. ranks: of the run; every method is a collective.
    """

    def __init__(self, *, on: bool, ranks: int) -> None:
        self.proving, self.closed = False, on
        self._on, self._ranks = on, ranks
        self._proved: set[int] = set()
        self._undecided: dict[int, int] = {}  # id of a step → how many more batches are compared
        self._graph: Results | None = None
        self._compared, self._early = False, False  # the batch of the next step, as far as is known
        self._left, self._reason = MORE, "weights are shards, and were written after optimize()"
        self._reference: _Reference | None = None
        self._rounding: Callable[[Expected, range], Mapping[str, float]] = lambda *_: {}

    def prove(self, step: StepGraph, pair: Pair | str) -> None:
        """Compare the captured graph with eager code; with the next batch too, where the values of
        this one prove nothing. Raises CaptureDiffers (GA108)."""
        self.proving = True
        try:
            proof = prove_together(pair, self._ranks)
        finally:
            self.proving = False
        self._proved.add(id(step))
        self._compared, self._early, self._graph = not proof.early, proof.early, proof.graph
        left = self._undecided.pop(id(step), MORE + 1) - 1
        if (proof.retry or proof.early) and left:
            self._undecided[id(step)] = left

    def later(self, step: StepGraph, pair: Callable[[], Pair | str] | None, *, whole: bool) -> None:
        """Check a step for a later batch; one from a capture of its own is compared like the first.

        pair: None where nothing can be compared. whole: whether this rank holds full weights: the
        plan's step is then compared too. Raises CaptureDiffers (GA108).
        """
        if not self._on or id(step) in self._proved:
            return
        if pair is not None:
            self.prove(step, pair())
            if whole:
                self.closed, self._reference = True, None
        else:
            progress("not proved", f"a new capture: {_SHARDS}", 0.0)
            self._proved.add(id(step))

    def expect(
        self, pair: Pair, plan: Plan, program: StepProgram, *, example: bool
    ) -> Expected | str | None:
        """What a step of this batch must give; called while weights are full. None where the model
        has no weights yet: it is then asked for before the first step."""
        if self._early:
            self._early = False
            self._reason = "no device ever had all weights"
            return None
        known, self._graph = self._graph, None
        return expect_together(pair, plan, program, self._ranks, example=example, known=known)

    def keep(
        self,
        expected: Expected | str,
        batch: Batch,
        model: nn.Module,
        trial: Callable[[bool], Mapping[str, Part] | None],
        *,
        example: bool,
    ) -> None:
        """Compare the next training step with this. model: in its current state, on this rank."""
        weights = _weights(model) if example else None
        self._reference = _Reference(expected, batch, trial, example, weights)

    def before(self, now: Now, model: nn.Module, trial: Callable[[bool], Any]) -> None:
        """Before a training step: determine what it must give, or compare a trial step.

        trial: of the step of this batch. Raises PlanDiffers (GA109) where a trial step differs, and
        CaptureDiffers (GA108) where an earlier batch proved nothing of the captured graph and this
        one contradicts it.
        """
        if self._undecided and not self._compared:
            self._decide(now)
        self._compared = False
        if not self.closed:
            self._graph = None
            return
        known = self._reference
        if known is None or (known.example and self._changed(known, model)):
            expected: Expected | str | None = self._reason
            if now.whole:
                pair = now.pair()
                assert isinstance(pair, Pair)
                expected = self.expect(pair, now.plan, now.program, example=False)
            elif known is not None and isinstance(known.expected, str):
                expected = known.expected
            assert expected is not None
            known = self._reference = _Reference(expected, now.batch, trial)
        expected = known.expected
        same = now.whole and _equal(known.batch, now.batch)
        pair = now.pair if same else None
        self._rounding = lambda expected, seeds: rounding_together(
            expected, pair, now.plan, self._ranks, seeds
        )
        if isinstance(expected, str):
            self._give_up(expected)
        elif expected.tried or not _equal(known.batch, now.batch):
            parts = known.trial(expected.constant)
            if parts is None:
                self._inconclusive(_OVERFLOW)
            else:
                self._conclude(expected, parts, now.mesh)

    def _decide(self, now: Now) -> None:
        """Compare a captured graph of which an earlier batch proved nothing."""
        step = now.step()
        if id(step) in self._undecided:
            self.prove(step, now.pair())

    def spoilt(self, overflow: Tensor | None) -> None:
        """Skip the comparison of an fp16 step whose gradients overflowed."""
        if self._reference is not None and overflow is not None and bool(overflow):
            self._inconclusive(_OVERFLOW)

    def check(self, given: Callable[[], Given], mesh: Mesh) -> None:
        """Compare the results of the first step with what they must be; afterwards nothing is
        compared, unless its values prove nothing.

        Raises PlanDiffers (GA109), in every step until one is correct.
        """
        if self._reference is not None:
            assert isinstance(self._reference.expected, Expected)
            self._conclude(self._reference.expected, parts_of(given()), mesh)

    def _conclude(self, expected: Expected, parts: Mapping[str, Part], mesh: Mesh) -> None:
        reason = expected.check(parts, mesh, lambda seeds: self._rounding(expected, seeds))
        if reason:
            self._inconclusive(reason)
        else:
            self._open()

    def _inconclusive(self, reason: str) -> None:
        """Compare the next step instead, MORE times at most."""
        self._left -= 1
        if self._left < 0:
            self._give_up(reason)
            return
        progress("not proved", f"the plan's step: {reason}; the next one is compared", 0.0)
        self._reference, self._reason = None, f"{reason}, and {_SHARDS}"

    def _changed(self, known: _Reference, model: nn.Module) -> bool:
        """Whether on some rank the reference is not for the model's current weights."""
        changed = isinstance(known.expected, str) or known.weights != _weights(model)
        if self._ranks == 1:
            return changed
        return any(from_all(changed, "whether weights changed on any rank"))

    def _give_up(self, reason: str) -> None:
        progress("not proved", f"the plan's step: {reason}", 0.0)
        self._open()

    def _open(self) -> None:
        self.closed, self._reference = False, None


def _weights(model: nn.Module) -> tuple[tuple[str, int, int], ...]:
    """Identity and version of every tensor of a model on this rank."""
    own = (*model.named_parameters(), *model.named_buffers())
    here = [(n, local_of(t)) for n, t in own if not isinstance(t, RemoteTensor)]
    return tuple((name, t.data_ptr(), version(t)) for name, t in here)


def _equal(one: Batch, other: Batch) -> bool:
    """Whether two batches have the same leaves."""
    if one.signature() != other.signature():
        return False
    pairs = zip(one.leaves, other.leaves, strict=True)
    return all(a is b or not isinstance(a, Tensor) or a.equal(b) for a, b in pairs)
