"""Connectionist temporal classification (`torch.nn.functional.ctc_loss`) as one batched op.

torch's own op reads the lengths on the host, so a graph with it cannot be captured. Here the
lengths stay tensors, and the gradient for the log probabilities is computed with the loss: the
backward multiplies by it. A graph saves one tensor [T, N, C], as much as torch's own backward
allocates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("graphaccel::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Losses [N], and the gradient [T, N, C] of their sum.

    log_probs: [T, N, C]. targets: [N, S], or [sum of target_lengths]. input_lengths,
    target_lengths: [N], integers.
    """
    given = log_probs, targets, input_lengths, target_lengths
    losses, alpha = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    ones = torch.ones_like(losses)
    gradient = aten._ctc_loss_backward.Tensor(ones, *given, losses, alpha, blank, zero_infinity)
    return losses, gradient


@ctc_losses.register_fake
def _(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    back = None if grad is None else grad[None, :, None] * gradient
    return back, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_keep)
OP = torch.ops.graphaccel.ctc_loss.default


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`, with the same arguments and result.

    Raises ValueError for a reduction that torch does not have.
    """
    lengths = [_lengths(x, log_probs) for x in (input_lengths, target_lengths)]
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs[:, None], targets[None]
        lengths = [x.reshape(1) for x in lengths]
    losses, _ = OP(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == "mean":
        return (losses / lengths[1].clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses[0] if single else losses
    raise ValueError(f"{reduction} is not a valid value for reduction")


def _lengths(given: Any, log_probs: Tensor) -> Tensor:
    """Lengths as a tensor; a constant tensor of batch size where they are all the same number."""
    if isinstance(given, Tensor):
        return given.to(log_probs.device, torch.long)
    if log_probs.dim() == 3 and len(set(given)) == 1:
        return log_probs.new_full((log_probs.shape[1],), given[0], dtype=torch.long)
    return torch.tensor(given, dtype=torch.long, device=log_probs.device)
