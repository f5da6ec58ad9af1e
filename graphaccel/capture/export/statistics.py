"""Forms of torch's statistics that can be captured: variances, covariances, running averages.

The gradient of torch's own variance has 2 / (n - 1) as one number, in which the size of the batch
can not be seen; its covariance, and BatchNorm with `momentum=None`, read values on the host; and
the running averages of InstanceNorm are written in a kernel that export does not record. Here they
are sums and means, whose counts are integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class _Reduction(NamedTuple):
    """dims: those reduced. count: of the values of each result, less the correction."""

    dims: tuple[int, ...]
    keepdim: bool
    count: int


def _var(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    built = _reduction(x, args, kwargs)
    return func(x, *args, **kwargs) if built is None else _moments(x, built)[0]


def _std(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    built = _reduction(x, args, kwargs)
    return func(x, *args, **kwargs) if built is None else _root(_moments(x, built)[0])


def _var_mean(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    built = _reduction(x, args, kwargs)
    return func(x, *args, **kwargs) if built is None else _moments(x, built)


def _std_mean(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    built = _reduction(x, args, kwargs)
    if built is None:
        return func(x, *args, **kwargs)
    var, mean = _moments(x, built)
    return _root(var), mean


def _cov(func: Callable[..., Any], x: Tensor, **kwargs: Any) -> Tensor:
    correction = kwargs.pop("correction", 1)
    if any(v is not None for v in kwargs.values()) or not x.is_floating_point() or x.dim() > 2:
        return func(x, correction=correction, **kwargs)
    rows = x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)
    rows = rows - rows.mean(1, keepdim=True)
    return (rows @ rows.mT / max(rows.shape[1] - correction, 0)).squeeze()


def _corrcoef(func: Callable[..., Any], x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dim() > 2:
        return func(x)
    built = _cov(torch.cov, x)
    if built.dim() == 0:
        return built / built
    scale = built.diagonal().sqrt()
    return (built / scale.unsqueeze(1) / scale.unsqueeze(0)).clamp(-1, 1)


def _instance_norm(
    func: Callable[..., Any],
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is None or running_var is None or not use_input_stats:
        return func(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    built = func(x, None, None, weight, bias, True, momentum, eps)
    with torch.no_grad():
        kept = _Reduction(tuple(range(2, x.dim())), False, prod(x.shape[2:]) - 1)
        var, mean = _moments(x, kept)
        for running, one in ((running_mean, mean), (running_var, var)):
            running.mul_(1 - momentum).add_(one.mean(0), alpha=momentum)
    return built


FORMS: Mapping[Any, Callable[..., Any]] = {
    torch.var: _var,
    torch.Tensor.var: _var,
    torch.std: _std,
    torch.Tensor.std: _std,
    torch.var_mean: _var_mean,
    torch.std_mean: _std_mean,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    F.instance_norm: _instance_norm,
}
"""torch function → what is traced for it: called with the function and its arguments."""


def _reduction(x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Reduction | None:
    """What a variance of `x` with these arguments reduces; None where torch's own form is kept: of
    the last dim alone, which is no dim of examples unless it is the only one."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if not {*kwargs} <= {"dim", "unbiased", "keepdim", "correction"}:
        return None
    names = ("unbiased",) if args and isinstance(args[0], bool) else ("dim", "unbiased", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    said = given.get("dim")
    dims = (said,) if isinstance(said, int) else said
    dims = tuple(range(x.dim()) if dims is None else dims)
    if not dims or not all(isinstance(dim, int) for dim in dims):
        return None  # of `dim=()` torch's gradient is another one than that of all dims
    dims = tuple(dim % x.dim() for dim in dims) if x.dim() else ()
    correction = given.get("correction")
    correction = int(given.get("unbiased", True)) if correction is None else correction
    count = prod(x.shape[dim] for dim in dims) - correction
    if (dims == (x.dim() - 1,) and x.dim() > 1) or count < 1 or count != int(count):
        return None
    return _Reduction(dims, bool(given.get("keepdim", False)), int(count))


def _moments(x: Tensor, reduction: _Reduction) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(reduction.dims, keepdim=True)
    var = (wide - mean).square().sum(reduction.dims, keepdim=reduction.keepdim) / reduction.count
    if not reduction.keepdim:
        mean = wide.mean(reduction.dims)
    return var.to(x.dtype), mean.to(x.dtype)


def _root(var: Tensor) -> Tensor:
    """The square root, whose gradient is 0 where it is 0, as that of torch's standard deviation."""
    zero = var == 0
    return var.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@contextmanager
def cumulative_averages() -> Iterator[None]:
    """Meanwhile the forward of BatchNorm with `momentum=None` counts its batches in a tensor."""
    original = _BatchNorm.forward

    def forward(self: Any, given: Tensor) -> Tensor:
        averaged = self.track_running_stats and self.training and self.momentum is None
        if not averaged or self.num_batches_tracked is None:
            return original(self, given)
        self._check_input_dim(given)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        built = F.batch_norm(given, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.to(mean.dtype)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(var, share)
        return built

    with patch.object(_BatchNorm, "forward", forward):
        yield
