"""The two sides of a comparison with eager code: the user's model, and a step under the plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from graphaccel.capture.batch import Batch
from graphaccel.dispatch.run import Prepared, Run
from graphaccel.dispatch.variants import Variant
from graphaccel.ir.program import StepProgram
from graphaccel.proof.comparison import Pair, pair_of
from graphaccel.proof.eager_step import Subject
from graphaccel.proof.gathered import gathered
from graphaccel.proof.planned import Given, Part, parts_of
from graphaccel.proof.trial import run_trial
from graphaccel.runtime.execution.state import StepResult
from graphaccel.runtime.module import own_forward


def model_pair(run: Run, batch: Batch) -> Pair:
    """The user's model beside the step that was captured from this batch."""
    step, sizes = run.compiler.capture(batch)
    batch = run.compiler.captures.with_numbers(step, batch)
    return pair_of(run.model, run.compiler.model.loss_fn, step, batch, sizes)


def whole_pair(run: Run, prepared: Prepared | None, batch: Batch) -> Pair | str:
    """The model beside the step captured from this batch, on gathered weights where this rank has
    shards; or why there is none. A collective then."""
    if prepared is None or prepared.whole:
        return model_pair(run, batch)
    pair = None
    if run.settings.devices == 1 or dist.get_rank() == 0:
        captures = run.compiler.captures
        step, sizes = run.compiler.capture(batch)
        model, loss_fn = captures.skeleton(), run.compiler.model.loss_fn
        subject = Subject(model, own_forward(model), loss_fn)
        pair = Pair(subject, step, captures.with_numbers(step, batch), sizes)
    return gathered(prepared.session, run.model, pair)


def step_results(run: Run, prepared: Prepared, result: StepResult, program: StepProgram) -> Given:
    """The results of a step of this program on this rank."""
    buffers = dict((*run.model.named_parameters(), *run.model.named_buffers()))
    written = {n for n in program.written if n in buffers and prepared.session.holds(n)}
    held = {n: buffers[n].detach() for n in written}
    return Given(result.loss, result.outputs, result.gradients, result.layouts, held, result.inputs)


def trial_step(
    run: Run, prepared: Prepared, variant: Variant, batch: Batch, constant: bool
) -> Mapping[str, Part] | None:
    """The results on this rank of a step that updates nothing; None where it overflowed.

    constant: random draws are constants.
    """

    def seen(result: StepResult) -> Mapping[str, Part] | None:
        overflowed = result.overflow is not None and bool(result.overflow)
        program = variant.compiled.program
        return None if overflowed else parts_of(step_results(run, prepared, result, program))

    leaves = variant.leaves(prepared.session, batch.leaves)
    return run_trial(prepared.session, variant.compiled, leaves, seen, constant=constant)
