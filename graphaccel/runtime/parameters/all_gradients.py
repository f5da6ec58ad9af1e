"""Global gradient norm, clipping and fp16 overflow detection over all ranks, before each step.

Both numbers, the norm that `clip_norm=` clips by and the overflow flag, are computed before the
optimizer's step, on the gradients as the script sees them, and stay on the device: the host does
not wait for them. `runtime.parameters.optimizer_step` passes them to the fused step; gradients of
parameters that torch's own code steps are clipped in place before it.

    norm = √ Σ g²      g ← g / max(1, (norm + 1e-6) / clip_norm)

as in torch.nn.utils.clip_grad_norm_ (Pascanu, Mikolov and Bengio, 2013, algorithm 1). Squares are
summed over the axes that a gradient is sharded over, then over the pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphaccel.errors import GraphMisuse
from graphaccel.kernels.multi_tensor.steps import MultiTensor
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor, local_of
from graphaccel.runtime.parameters.step_hooks import closure_of

Optimizer = torch.optim.Optimizer


_GRADIENTS = "the gradients' norm of all ranks"


class AllGradients:
    """Norm and overflow before every step of one optimizer; `before` is the hook for it.

    clip_norm: largest norm, or None. scale: of the loss, where gradients may overflow (fp16): it is
    updated here. elsewhere: ids of parameters that another pipeline rank counts.
    """

    def __init__(
        self,
        mesh: Mesh,
        clip_norm: float | None,
        *,
        scale: LossScale | None = None,
        elsewhere: Iterable[Tensor] = (),
    ) -> None:
        self.clip_norm = clip_norm
        self.norm: Tensor | None = None
        self.overflow: Tensor | None = None
        self._mesh, self._scale = mesh, scale
        if scale is not None:
            scale.each_call = False
        self._elsewhere = {id(p) for p in elsewhere}
        self._many = MultiTensor()

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """The hook. Raises GraphMisuse (GA407) where a closure would compute gradients later."""
        if self.clip_norm is not None and closure_of(args, kwargs) is not None:
            raise GraphMisuse(
                what="optimizer.step(closure) with clip_norm=: the gradients that it would clip "
                "are made in the step",
                help_line="call the closure first, then optimizer.step()",
            )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        given = [(p, p.grad) for p in params if p.grad is not None]
        if self._scale is not None:
            # the gradients of a closure that the step itself calls do not pass here
            self._scale.each_call = closure_of(args, kwargs) is not None
            self.overflow = spoiled([g for _, g in given], self._mesh.device)
            self._scale.update()
        if self.clip_norm is not None:
            wide = any(p.dtype == torch.float64 for p in params)
            own = [g for p, g in given if id(p) not in self._elsewhere]
            self.norm = self._norm(own, torch.float64 if wide else torch.float32)
            scale = getattr(optimizer, "grad_scale", None)  # torch.amp.GradScaler's, not ours
            if scale is not None:
                self.norm = self.norm / scale.to(self.norm.device)

    def _norm(self, gradients: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """The norm of the gradients of all ranks, a scalar."""
        sets: dict[str, list[Tensor]] = {}
        for gradient in gradients:
            if not isinstance(gradient, RemoteTensor):
                axes = gradient.sharding.axes if isinstance(gradient, ShardTensor) else ""
                sets.setdefault(axes, []).append(local_of(gradient))
        total = torch.zeros((), dtype=dtype, device=self._mesh.device)
        for axes, some in sorted(sets.items()):
            squares = self._many.squares(some).to(total.device, dtype)
            if axes:
                with answered(_GRADIENTS):
                    dist.all_reduce(squares, group=self._mesh.group(axes))
            total = total + squares
        if self._mesh.pipeline > 1:
            with answered(_GRADIENTS):
                dist.all_reduce(total, group=self._mesh.pipeline_group)
        return total.sqrt_()

    def clip(self, gradients: Iterable[Tensor]) -> None:
        """Clip in place those gradients of this step that the fused step does not clip."""
        if self.clip_norm is None or self.norm is None:
            return
        own = [g for g in map(local_of, gradients) if not isinstance(g, RemoteTensor)]
        kinds: dict[tuple[Any, Any], list[Tensor]] = {}
        for gradient in own:
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        factor = torch.clamp(self.clip_norm / (self.norm + 1e-6), max=1.0)
        for (device, dtype), some in kinds.items():
            torch._foreach_mul_(some, factor.to(device, dtype))

    @property
    def marks(self) -> bool:
        """Whether a step leaves out an update whose gradients have the NaN of an overflow."""
        return self._scale is not None and not self._scale.each_call

    @torch.no_grad()
    def prepare(self, params: Iterable[Tensor]) -> None:
        """Prepare gradients for torch's own code: None after an overflow, else clipped."""
        given = [p for p in params if p.grad is not None]
        if self.overflow is not None and bool(self.overflow):
            for p in given:
                p.grad = None
        self.clip(p.grad for p in given if p.grad is not None)

    def prepare_all(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook that prepares all gradients, where all steps are torch's own code."""
        self.prepare(p for group in optimizer.param_groups for p in group["params"])


def spoil(gradients: Iterable[Tensor], overflow: Tensor) -> None:
    """If `overflow` is nonzero, write a NaN into every gradient: it survives accumulation, and
    `spoiled` detects it on any rank. The host does not wait for the device."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for first in _firsts(gradients):
        kinds.setdefault(first.dtype, []).append(first)
    for dtype, firsts in kinds.items():
        nan = torch.full_like(overflow, float("nan"))
        torch._foreach_add_(firsts, torch.where(overflow > 0, nan, 0.0).to(dtype))


def spoiled(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """1 where a gradient comes from an overflowed step, else 0: a float32 scalar on `device`."""
    firsts = [f.to(device, torch.float32) for f in _firsts(map(local_of, gradients))]
    if not firsts:
        return torch.zeros((), device=device)
    return torch.stack(firsts).isnan().any().to(torch.float32)


def _firsts(gradients: Iterable[Tensor]) -> list[Tensor]:
    own = [g for g in gradients if not isinstance(g, RemoteTensor) and g.numel()]
    return [g[(0,) * g.dim()] for g in own]
