"""Multi-tensor optimizer steps: one launch on CUDA, torch's fused kernels elsewhere.

    Adam     m ← m + (g − m)(1 − β₁)      v ← β₂ v + (1 − β₂) g²
             p ← p − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    AdamW    p ← p (1 − lr λ) first       Adam: g ← g + λ p first
    SGD      g ← g + λ p     b ← μ b + (1 − τ) g  (first step: b ← g)     p ← p − lr (b, or g + μ b)

in the order of torch.optim (Kingma and Ba, 2015; Loshchilov and Hutter, 2019, algorithm 2). The
same pass divides gradients by a loss scale, clips them by their global norm, changes nothing after
an overflow, writes weights in a second dtype and zeroes the gradients. The host does not wait for
the device: scales, norms and overflows stay there. Pointers to the tensors are in a table on the
device that is rebuilt only when one of them moves or has another size. Bytes per parameter of Adam
in float32: 28.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphaccel.compat.torch.optimizers import fused_adam, fused_sgd
from graphaccel.kernels.jit import has_triton
from graphaccel.kernels.multi_tensor.tables import Tables


@dataclass(frozen=True)
class AdamRule:
    """decoupled: AdamW."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    decoupled: bool


@dataclass(frozen=True)
class SGDRule:
    """torch.optim.SGD's numbers."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    decay: float


@dataclass(frozen=True)
class Around:
    """What is done in the same pass.

    scale: gradients are divided by it. found_inf: where it is nonzero, nothing is updated; both are
    scalars on the device of the tensors. max_norm: of all gradients together, after the scale.
    norm: theirs, where other ranks or other calls have some of them; otherwise it is computed here.
    finite: an update with a non-finite gradient norm is skipped. zero: gradients are zeroed.
    copies: weights in another dtype, one per tensor.
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None
    max_norm: float | None = None
    norm: Tensor | None = None
    finite: bool = False
    zero: bool = False
    copies: Sequence[Tensor] | None = None


PLAIN = Around()


@dataclass
class MultiTensor:
    """Steps of one optimizer. kernels: whether Triton runs them; if None, on CUDA tensors."""

    kernels: bool | None = None
    tables: Tables = field(default_factory=Tables)

    def adam(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        rules: Sequence[AdamRule],
        around: Around = PLAIN,
    ) -> Tensor | None:
        """One step of Adam or AdamW, in place; returns the norm of the gradients where they are
        clipped.

        steps: scalars, incremented by one; on the device of the tensors where an update may be
        skipped there. rules: one per tensor. All contiguous; a tensor's gradient and moments have
        its shape.

        Raises ValueError where steps are on the CPU and only the device knows of an overflow.
        """
        if not params:
            return None
        norm, scale, result = self._scaled(grads, around)
        steps = list(steps)
        on_host = steps[0].device.type == "cpu"
        if self._triton(params):
            if result is not None and on_host and params[0].device.type != "cpu":
                raise ValueError(
                    "an update that the device may leave out needs step counts on the device: "
                    "fused=True or capturable=True"
                )
            torch._foreach_add_(steps, 1)
            rows = [(r.lr, r.beta1, r.beta2, r.eps, r.decay) for r in rules]
            self.tables.adam(
                params, grads, exp_avgs, exp_avg_sqs, steps, rows,
                [r.decoupled for r in rules], scale, result, around.zero, around.copies,
            )  # fmt: skip
            if result is not None:
                torch._foreach_sub_(steps, [result.to(steps[0].dtype)] * len(steps))
            return norm
        if result is None or not bool(result):
            # A number would be converted to a tensor for each of them.
            torch._foreach_add_(steps, torch.ones((), device="cpu"), alpha=1)
            scale = _divided(grads, scale)
            lists = [list(given) for given in (params, grads, exp_avgs, exp_avg_sqs, steps)]
            for places in _by_equal_keys([id(r) for r in rules]):
                rule, some = rules[places[0]], lists
                if len(places) < len(params):
                    some = [[given[i] for i in places] for given in lists]
                fused_adam(
                    *some, lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, eps=rule.eps,
                    weight_decay=rule.decay, decoupled=rule.decoupled, grad_scale=scale,
                )  # fmt: skip
            _copy_out(params, around)
        if around.zero:
            torch._foreach_zero_(list(grads))
        return norm

    def sgd(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor | None],
        first: Sequence[bool],
        rules: Sequence[SGDRule],
        around: Around = PLAIN,
    ) -> Tensor | None:
        """One step of SGD, in place; returns the norm of the gradients where they are clipped.

        buffers: momentum, None where a rule has none. first: whether a buffer is still empty.
        """
        if not params:
            return None
        norm, scale, result = self._scaled(grads, around)
        if self._triton(params):
            rows = [(r.lr, r.momentum, r.dampening, r.decay, float(f))
                    for r, f in zip(rules, first, strict=True)]  # fmt: skip
            kinds = [(b is not None, r.nesterov) for b, r in zip(buffers, rules, strict=True)]
            self.tables.sgd(
                params, grads, buffers, rows, kinds, scale, result, around.zero, around.copies
            )
            return norm
        if result is None or not bool(result):
            scale = _divided(grads, scale)
            keys = [(id(r), f) for r, f in zip(rules, first, strict=True)]
            for places in _by_equal_keys(keys):
                rule, new = rules[places[0]], first[places[0]]
                own = [buffers[i] for i in places]
                fused_sgd(
                    [params[i] for i in places], [grads[i] for i in places],
                    [b for b in own if b is not None], lr=rule.lr, momentum=rule.momentum,
                    dampening=rule.dampening, nesterov=rule.nesterov, weight_decay=rule.decay,
                    first=new, grad_scale=scale,
                )  # fmt: skip
            _copy_out(params, around)
        if around.zero:
            torch._foreach_zero_(list(grads))
        return norm

    def _triton(self, params: Sequence[Tensor]) -> bool:
        return (params[0].is_cuda and has_triton()) if self.kernels is None else self.kernels

    def squares(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum of squares of tensors on one device: a scalar there, in float64 if one of them
        is."""
        if self._triton(grads) and all(g.dtype != torch.float64 for g in grads):
            return self.tables.squares(grads)
        wide = any(g.dtype == torch.float64 for g in grads)
        kind = torch.float64 if wide else torch.float32
        norms = torch._foreach_norm(list(grads), 2, dtype=kind)
        return torch.stack(norms).square_().sum()

    def _scaled(
        self, grads: Sequence[Tensor], around: Around
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The norm, the divisor of the gradients, and whether nothing is to be updated."""
        if around.max_norm is None:
            return None, around.scale, around.found_inf
        norm = around.norm
        if norm is None:
            norm = self.squares(grads).sqrt()
            norm = norm if around.scale is None else norm / around.scale
        # As in torch.nn.utils.clip_grad_norm_; one division for both.
        divisor = torch.clamp((norm + 1e-6) / around.max_norm, min=1.0)
        result = around.found_inf
        if around.finite:
            infinite = (~torch.isfinite(norm)).to(torch.float32)
            result = (
                infinite if result is None else torch.maximum(infinite, result.to(torch.float32))
            )
        return norm, divisor if around.scale is None else divisor * around.scale, result


def _by_equal_keys(keys: Sequence[object]) -> list[list[int]]:
    """The positions of equal keys."""
    positions: dict[object, list[int]] = {}
    for place, key in enumerate(keys):
        positions.setdefault(key, []).append(place)
    return list(positions.values())


def _divided(grads: Sequence[Tensor], scale: Tensor | None) -> Tensor | None:
    """The divisor for torch's fused steps, which support it in float32 only; gradients in float64
    are divided here."""
    if scale is None or all(g.dtype != torch.float64 for g in grads):
        return None if scale is None else scale.to(torch.float32)
    torch._foreach_div_(list(grads), scale)
    return None


def _copy_out(params: Sequence[Tensor], around: Around) -> None:
    if around.copies is not None:
        torch._foreach_copy_(list(around.copies), list(params))
