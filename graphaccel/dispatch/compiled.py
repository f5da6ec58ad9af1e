"""Makes the compiled step of a captured step and its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphaccel.capture.export.outputs import output_names
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import pytree
from graphaccel.compiler.schedules import forward_schedule, schedule_of
from graphaccel.ir.program import StepProgram
from graphaccel.passes.pipeline import backward_of
from graphaccel.planner.plan.plan import Plan
from graphaccel.progress import progress
from graphaccel.runtime.dropped import Dropped
from graphaccel.runtime.execution.parts import in_order
from graphaccel.runtime.inductor.compile import StageCompiler
from graphaccel.runtime.module import Kept
from graphaccel.runtime.session import CompiledStep


def compiled_training(
    step: StepGraph, program: StepProgram, plan: Plan, plain: Mapping[int, Any]
) -> CompiledStep:
    """A training step of a plan. plain: leaf → value of what it returns besides tensors."""
    outside = program.bare is not None
    return CompiledStep(
        program,
        schedule_of(plan, program),
        plan.microbatches,
        _constants(step),
        _rebuilder(step, plain),
        (lambda outputs: backward_of(program, plan, outputs)) if outside else None,
        _stage_compiler(plan),
    )


def compiled_evaluation(
    step: StepGraph, program: StepProgram, plan: Plan, plain: Mapping[int, Any]
) -> CompiledStep:
    """A forward-only step under a plan. plain: as of `compiled_training`."""
    schedule = forward_schedule(plan, program)
    compiler, rebuild = _stage_compiler(plan), _rebuilder(step, plain)
    return CompiledStep(program, schedule, 1, _constants(step), rebuild, compiler=compiler)


def _constants(step: StepGraph) -> dict[str, torch.Tensor]:
    """The model's constants, as they are now."""
    return {name: constant.clone() for name, constant in step.forward.constants.items()}


def _stage_compiler(plan: Plan) -> StageCompiler | None:
    if plan.compile == "off":
        return None
    asked = "compile" in plan.pinned  # not the default of GPUs
    strict = asked and plan.fallback == "error"
    return StageCompiler(progress, layers=not plan.min_cut, strict=strict)


def _rebuilder(
    step: StepGraph, plain: Mapping[int, Any]
) -> Callable[[torch.Tensor | None, Mapping[int, torch.Tensor]], Any]:
    """Builds what the user's model returns from the loss and the other outputs by leaf."""
    returned = step.forward.returned
    spec = returned.spec
    names = output_names(pytree.tree_unflatten(list(range(returned.num_leaves)), spec))

    def rebuild(loss: torch.Tensor | None, outputs: Mapping[int, torch.Tensor]) -> Any:
        leaves: list[Any] = []
        for i in range(returned.num_leaves):
            if i == returned.loss_leaf and loss is not None:
                leaves.append(loss)
            elif i in outputs:
                kept = loss is not None and loss.requires_grad and i in returned.tracked
                name, output = names.get(i, f"output {i}"), in_order(outputs[i], returned.orders[i])
                leaves.append(Kept.apply(name, output, loss) if kept else output)
            else:
                leaves.append(plain.get(i, Dropped(names.get(i, f"output {i}"))))
        return pytree.tree_unflatten(leaves, spec)

    return rebuild
