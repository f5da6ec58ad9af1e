"""The compiled steps of a run by kind of batch; one of a new kind is captured and compiled."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compiler.ignored_rows import Completed, check_last, completed
from graphaccel.compiler.input_checks import check_indices, check_positions, shape_changed
from graphaccel.dispatch.comparisons import whole_pair
from graphaccel.dispatch.compiled import compiled_evaluation, compiled_training
from graphaccel.dispatch.eager_errors import eager_errors
from graphaccel.dispatch.run import Prepared, Run, dtypes_of
from graphaccel.dispatch.together import capture_together
from graphaccel.dispatch.variants import Variant, Variants
from graphaccel.errors import BatchChanged, CaptureRefused, DeviceOutOfMemory
from graphaccel.errors.messages import format_bytes
from graphaccel.ir.program import StepProgram
from graphaccel.planner.plan.plan import Plan
from graphaccel.progress import progress
from graphaccel.runtime.parameters.later_layouts import add_layouts_of
from graphaccel.runtime.session import CompiledStep


class Steps:
    """Compiled steps by signature of the batch and mode of the model, `max_programs` at most.

    memory: predicted, of this rank, for the parameters that are trained.
    """

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self._run, self._prepared = run, prepared
        self._reported_sizes: set[int] = set()
        self._trained, self.memory = prepared.planned.step.trainable, prepared.memory
        self._known = Variants(run.settings.max_programs, prepared.session.forget)
        self._by_inductor = 0

    def first(self, batch: Batch, *, example: bool) -> Variant:
        """The step of the batch that was planned for."""
        planned = self._prepared.planned
        step, program, plan = planned.step, planned.program, self._bounded(planned.plan)
        compiled = compiled_training(step, program, plan, self._returned(step, batch))
        return self._add(_training_key(batch), batch, step, compiled, example=example)

    def beside_prediction(self, error: DeviceOutOfMemory) -> DeviceOutOfMemory:
        """The error with what was predicted for this rank."""
        now = replace(self._prepared, memory=self.memory)
        return now.beside_prediction(error, self._run.compiler)

    def completed(self, batch: Batch) -> Completed | None:
        """How a training batch that the plan cannot split evenly is completed, if it is one. The
        first of each size is reported to the user. Collective. Raises BatchNotDivisible (GA206)."""

        def captured(whole: Batch) -> StepGraph:
            capture_together(self._run, whole)
            return self._run.compiler.capture(whole)[0]

        planned = self._prepared.planned
        more = completed(planned.step, planned.plan, batch, captured, self._returned)
        if more is not None and more.size not in self._reported_sizes:
            self._reported_sizes.add(more.size)
            progress("batch", more.line(batch), 0.0)
        return more

    def check_last(self, rows: int, left_out_by: str) -> None:
        """Ask about the last batch of each epoch (`ignored_rows.check_last`). Raises
        BatchNotDivisible (GA206)."""
        check_last(self._prepared.planned.step, self._prepared.planned.plan, rows, left_out_by)

    def training(self, batch: Batch, trained: frozenset[str]) -> Variant:
        """The training step of a batch. trained: the parameters that require a gradient now.

        Raises BatchChanged (GA406) for other dtypes, and for other inputs where the model computes
        no loss of them.
        """
        key = _training_key(batch)
        known = self._known.find(key, trained)
        if known is not None:
            check_indices(known.step, batch)
            return known
        run, prepared = self._run, self._prepared
        other = _other_inputs(batch, prepared.dtypes)
        planned = prepared.planned
        with self._own_errors(batch, other):
            capture_together(run, batch)
            captured, sizes = run.compiler.capture(batch)
        if other is not None and captured.has_loss != planned.step.has_loss:
            raise other
        check_indices(captured, batch)
        check_positions(captured, sizes)
        step, program = run.compiler.compile(batch, planned, prepared.stored)
        self._follow_trained(batch, step, program)
        run.gate.later(step, lambda: whole_pair(run, prepared, batch), whole=prepared.whole)
        plan = self._bounded(planned.plan)
        compiled = compiled_training(step, program, plan, self._returned(step, batch))
        return self._add(key, batch, step, compiled)

    @contextmanager
    def _own_errors(self, batch: Batch, other: BatchChanged | None) -> Iterator[None]:
        """Where a capture in this context is refused: raises `other`, if given, or how the batch's
        shapes changed, or what the forward raises in eager mode."""
        run, prepared = self._run, self._prepared
        own = eager_errors(run.model, run.compiler.model.loss_fn, batch)
        with own if prepared.whole else nullcontext():
            try:
                yield
            except CaptureRefused as error:
                changed = other or shape_changed(prepared.planned.step, batch)
                if changed is None:
                    raise
                raise changed from error

    def _follow_trained(self, batch: Batch, step: StepGraph, program: StepProgram) -> None:
        """Lay out gradients and optimizer state of parameters that no step before trained, predict
        memory anew, and report it to the user. Collective."""
        run, prepared = self._run, self._prepared
        unfrozen = step.trainable - self._trained
        if not unfrozen:
            return
        self._trained |= unfrozen
        add_layouts_of(prepared.session, program, run.optimizer)
        prepared.updates.follow(run.model, prepared.session)
        said, planned = _unfrozen(run.model, unfrozen), prepared.planned
        if self.memory is not None and planned.plan.prediction is not None:
            now = run.compiler.memory(replace(planned, step=step, program=program), batch)
            at = prepared.session.mesh.pipeline_index
            self.memory = now.of_ranks(planned.plan.prediction.chosen)[at]
            said += f", {format_bytes(self.memory.peak)} predicted"
        progress("unfrozen", said, 0.0)

    def evaluation(self, batch: Batch) -> Variant:
        """The forward-only step of a batch, in the model's current mode."""
        training = self._run.model.training
        key = (training, batch.signature())
        known = self._known.find(key)
        if known is not None:
            check_indices(known.step, batch)
            return known
        run, planned = self._run, self._prepared.planned
        stored = self._prepared.stored
        with self._own_errors(batch, None):
            step, program = run.compiler.compile_evaluation(
                batch, planned, stored, training=training
            )
        check_indices(step, batch)
        run.gate.later(step, None, whole=False)
        plan = self._bounded(planned.plan)
        compiled = compiled_evaluation(step, program, plan, self._returned(step, batch))
        return self._add(key, batch, step, compiled)

    def _returned(self, step: StepGraph, batch: Batch) -> Mapping[int, Any]:
        return self._run.compiler.captures.returned(step, batch)

    def _bounded(self, plan: Plan) -> Plan:
        """The plan for one more program. After `max_programs` Inductor compiles no further ones,
        which is reported to the user once: shapes that change in every batch would be compiled
        without end. All ranks make the same calls."""
        if plan.compile == "off":
            return plan
        self._by_inductor += 1
        most = self._run.settings.max_programs
        if self._by_inductor <= most:
            return plan
        if self._by_inductor == most + 1:
            progress("compile", _enough(most), 0.0)
        return replace(plan, compile="off")

    def _add(
        self,
        key: Hashable,
        batch: Batch,
        step: StepGraph,
        compiled: CompiledStep,
        *,
        example: bool = False,
    ) -> Variant:
        captures = self._run.compiler.captures
        variant = Variant(compiled, captures.guards(step, batch), step, captures.left(step))
        return self._known.add(key, variant, example=example)


def _unfrozen(model: nn.Module, names: frozenset[str]) -> str:
    """What is reported of parameters that a new capture trains."""
    own = [name for name, _ in model.named_parameters() if name in names]
    more = f" and {len(own) - 3} more" if len(own) > 3 else ""
    return f"{', '.join(own[:3])}{more}: the step is captured anew, under the same plan"


def _enough(most: int) -> str:
    return (
        f"Inductor has compiled max_programs={most} shapes of batches; new ones run as FX code; "
        "pad lengths to a multiple to have fewer shapes"
    )


def _training_key(batch: Batch) -> Hashable:
    return ("train", batch.signature())


def _other_inputs(batch: Batch, dtypes: Mapping[str, torch.dtype]) -> BatchChanged | None:
    """How the inputs of a batch are others than the first one's; those, or sizes that differ, are
    captured anew. Raises BatchChanged (GA406) for another dtype."""
    given = dtypes_of(batch)
    for name, dtype in given.items():
        if dtype != dtypes.get(name, dtype):
            raise BatchChanged(what=f"dtype of {name}", expected=str(dtypes[name]), got=str(dtype))
    if set(given) == set(dtypes):
        return None
    expected, got = ", ".join(dtypes), ", ".join(given)
    return BatchChanged(what="the inputs of the model", expected=expected, got=got)
