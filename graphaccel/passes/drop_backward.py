"""Remove the backward from a step: what an evaluation under `torch.no_grad()` runs.

before                                    after
  %l: f32[] = aten.div.Tensor(%n, %c)       %l: f32[] = aten.div.Tensor(%n, %c)
  %g: f32[32,8] = aten.mm(%t, %x)           return (%l)
  return (%l, %g)
"""

from __future__ import annotations

from dataclasses import replace

from graphaccel.capture.export.export import ForwardGraph
from graphaccel.capture.stepgraph import StepGraph, assemble, of_few
from graphaccel.planner.plan.plan import Plan


def drop_backward(step: StepGraph, plan: Plan) -> StepGraph:
    """The forward alone."""
    del plan
    return of_few(step, _dropped)


def _dropped(step: StepGraph) -> StepGraph:
    return assemble(
        _untracked(step.forward),
        tuple((symbol, size, _untracked(other)) for symbol, size, other in step.others),
        step.sizes,
        step.batch_dims,
        step.tied,
        frozenset(),
        step.training,
    )


def _untracked(forward: ForwardGraph) -> ForwardGraph:
    """The forward with no batch leaf that requires a gradient."""
    return replace(forward, inputs=tuple(replace(i, tracked=False) for i in forward.inputs))
