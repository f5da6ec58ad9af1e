"""The fused head and loss: with ignored tokens left out, and computed but not counted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.kernels import accumulate
from graphaccel.kernels.accumulate import add_product, adds_wide
from graphaccel.kernels.ops.linear_cross_entropy import forward_by_chunks, loss_of_chunk

IGNORED, WORDS, WIDTH = -100, 40, 16


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 7, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(WORDS, WIDTH, generator=generator, dtype=dtype)
    bias = torch.randn(WORDS, generator=generator, dtype=dtype)
    target = torch.randint(WORDS, (3, 7), generator=generator)
    target[0, 2:] = target[2, -1] = IGNORED
    return x, weight, bias, target


def head(*values: Tensor, select: bool) -> tuple[Tensor, ...]:
    return forward_by_chunks(*values, IGNORED, 4, loss_of_chunk, select=select)


@pytest.mark.parametrize("select", [True, False])
def test_it_is_that_of_eager_in_float64(select: bool) -> None:
    *values, target = given()
    leaves = [v.clone().requires_grad_() for v in values]
    scores = F.linear(leaves[0], leaves[1], leaves[2]).reshape(-1, WORDS)
    loss = F.cross_entropy(scores, target.reshape(-1), reduction="sum", ignore_index=IGNORED)
    right = (loss, *torch.autograd.grad(loss, leaves))
    made = head(*values, target, select=select)
    for a, b in zip(made, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("select", [True, False])
def test_no_label_counts(select: bool) -> None:
    *values, target = given()
    made = head(*values, torch.full_like(target, IGNORED), select=select)
    assert all(not value.any() for value in made)


def test_rows_that_do_not_count_may_be_infinite() -> None:
    x, *others, target = given()
    x[0, 4] = float("inf")
    assert all(value.isfinite().all() for value in head(x, *others, target, select=True))
    made = head(x, *others, target, select=False)
    assert made[0].isfinite()


def test_the_host_does_not_wait_for_the_number_of_tokens() -> None:
    """A fake tensor has no content: asking for it raises."""
    with FakeTensorMode() as mode:
        values = [mode.from_tensor(v) for v in given()]
        assert head(*values, select=False)[1].shape == values[0].shape
        with pytest.raises(Exception, match="nonzero"):
            head(*values, select=True)


@pytest.mark.parametrize("wide", [True, False])
def test_products_are_added_in_float32(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    def addmm(
        into: Tensor, a: Tensor, b: Tensor, *, beta: int, out_dtype: torch.dtype, out: Tensor
    ) -> Tensor:
        assert out is into
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype) + (beta * into if beta else 0))

    monkeypatch.setattr(accumulate, "adds_wide", lambda device: wide)
    monkeypatch.setattr(torch, "addmm", addmm)
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 5).bfloat16()
    into = torch.full((4, 5), float("nan"))
    for first in (True, False):
        add_product(into, a, b, first=first)
    close = partial(torch.testing.assert_close, rtol=2**-7, atol=2**-6)
    close(into, 2 * (a.float() @ b.float()))


def test_a_cpu_has_no_such_product() -> None:
    assert not adds_wide(torch.device("cpu"))
