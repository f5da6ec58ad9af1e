"""Forms of torch's statistics that are traced: values and gradients of torch's own, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.capture.export.statistics import FORMS, cumulative_averages

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom")

CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((0,), {}),
    ((False,), {}),
    ((0, True, True), {}),
    ((), {"dim": (0, -1), "correction": 2, "keepdim": True}),
    ((), {"dim": None, "unbiased": False}),
    (((),), {"correction": 0}),
    ((-1,), {}),
]
INPUTS = {
    "random": lambda: torch.randn(5, 4, 3),
    "equal rows": lambda: torch.ones(4, 2),
    "one row": lambda: torch.randn(1, 3),
}


def _gradient(function: Callable[[Tensor], Any], x: Tensor) -> tuple[list[Tensor], Tensor]:
    x = x.clone().requires_grad_()
    made = function(x)
    several = list(made) if isinstance(made, tuple) else [made]
    sum(
        (one * torch.arange(1, 1 + one.numel()).view(one.shape)).sum() for one in several
    ).backward()
    assert x.grad is not None
    return several, x.grad


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("function", [torch.var, torch.std, torch.var_mean, torch.std_mean])
def test_variances(function: Callable[..., Any], name: str) -> None:
    torch.manual_seed(0)
    x = INPUTS[name]().double()
    for args, kwargs in CALLS:
        want, slope = _gradient(lambda v, a=args, k=kwargs: function(v, *a, **k), x)
        got, ours = _gradient(lambda v, a=args, k=kwargs: FORMS[function](function, v, *a, **k), x)
        close = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}
        torch.testing.assert_close(got, want, **close)
        torch.testing.assert_close(ours, slope, **close)


@pytest.mark.parametrize("shape", [(5, 4), (6,), ()])
def test_covariances(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for function in (torch.cov, torch.corrcoef):
        got = FORMS[function](function, x)
        torch.testing.assert_close(got, function(x), rtol=1e-12, atol=1e-14, equal_nan=True)
    got = FORMS[torch.cov](torch.cov, x, correction=0)
    torch.testing.assert_close(got, torch.cov(x, correction=0), rtol=1e-12, atol=1e-14)


def test_batch_norm_with_a_cumulative_average() -> None:
    torch.manual_seed(0)
    pair = [nn.BatchNorm1d(4, momentum=None).double() for _ in range(2)]
    for _ in range(3):
        x = torch.randn(6, 4).double()
        want = pair[0](x)
        with cumulative_averages():
            torch.testing.assert_close(pair[1](x), want)
    for (name, value), got in zip(
        pair[0].state_dict().items(), pair[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got, value, msg=name)


@pytest.mark.parametrize("affine", [False, True])
def test_running_averages_of_instance_norm(affine: bool) -> None:
    torch.manual_seed(0)
    pair = [nn.InstanceNorm2d(3, track_running_stats=True, affine=affine).double() for _ in "ab"]
    form = FORMS[F.instance_norm]
    for training in (True, True, False):
        x = torch.randn(4, 3, 5, 2).double()
        for norm in pair:
            norm.train(training)
        want = pair[0](x)
        with patch.object(F, "instance_norm", partial(form, F.instance_norm)):
            torch.testing.assert_close(pair[1](x), want)
    assert pair[0].running_mean.abs().max() > 1e-3
    torch.testing.assert_close(pair[1].state_dict(), pair[0].state_dict(), rtol=1e-12, atol=1e-14)
