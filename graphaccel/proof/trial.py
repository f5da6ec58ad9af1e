"""A step under a plan that updates nothing, on a batch whose correct result is known.

It is used where the first training step itself cannot be compared: random draws differ from one
device's, the loss is computed by the script, or only another batch was seen while weights were
full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphaccel.proof.comparison import tangent
from graphaccel.proof.constant_draws import ConstantDraws
from graphaccel.proof.untouched import RandomState
from graphaccel.runtime.execution.external_loss import ExternalLossExecutor
from graphaccel.runtime.execution.state import StepResult
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.session import CompiledStep, Session


def run_trial(
    session: Session,
    compiled: CompiledStep,
    leaves: Sequence[Any],
    seen: Callable[[StepResult], Any],
    *,
    constant: bool,
) -> Any:
    """The result of `seen` for one step. A collective; buffers, random states and the loss scale
    are restored afterwards, and no gradient is handed out.

    constant: random draws are constants (`ConstantDraws`), without Inductor, which has its own.
    """
    if constant:
        compiled = replace(compiled, compiler=None)
    with _restored(session, compiled), torch.no_grad(), ExitStack() as stack:
        if constant:
            stack.enter_context(ConstantDraws())
        return seen(_step(session, compiled, leaves))


def _step(session: Session, compiled: CompiledStep, leaves: Sequence[Any]) -> StepResult:
    executor = session.apart(compiled)
    if not isinstance(executor, ExternalLossExecutor):
        return executor.run(leaves, _same_scale(session.scale))
    call = executor.forward(leaves)
    outputs = {i: x.detach() for i, x in call.outputs.items()}
    tangents = {i: tangent(i, outputs[i]) for i in compiled.program.tangents}
    gradients, inputs = executor.backward(call, tangents, keep=False) if tangents else ({}, {})
    return StepResult(None, gradients, outputs, layouts=session.gradients, inputs=inputs)


def _same_scale(scale: LossScale | None) -> LossScale | None:
    if scale is None:
        return None
    loss_scale = LossScale(scale.device, scale.interval)
    loss_scale.factor.copy_(scale.factor)
    return loss_scale


@contextmanager
def _restored(session: Session, compiled: CompiledStep) -> Iterator[None]:
    """Restore buffers that a step writes, and random states."""
    held = session.held({}).buffers
    written = compiled.program.written
    before: list[tuple[Tensor, Tensor]] = [
        (held[n], held[n].detach().clone()) for n in sorted(written) if n in held
    ]
    state = RandomState.here()
    try:
        yield
    finally:
        state.restore()
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
