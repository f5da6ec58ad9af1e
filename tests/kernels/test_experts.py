"""Products of rows with the weights of their experts, against a look-up of a weight a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphaccel.kernels.ops import experts as module
from graphaccel.kernels.ops.experts import GRADIENT, GROUPED_MATMUL

EXPERTS, ROWS, INNER, OUTER = 6, 40, 8, 16


def looked_up(x: Tensor, w: Tensor, chosen: Tensor, transposed: bool) -> Tensor:
    """`batched_mm`, as Hugging Face writes it."""
    each = w[chosen].transpose(1, 2) if transposed else w[chosen]
    return torch.bmm(x[:, None], each)[:, 0]


def drawn(transposed: bool, chosen: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, OUTER, INNER) if transposed else (EXPERTS, INNER, OUTER)
    x = torch.randn(ROWS, INNER, generator=generator, dtype=torch.float64)
    w = torch.randn(shape, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, EXPERTS, (ROWS,), generator=generator)
    ids = {"any": ids, "one": torch.full_like(ids, 4), "some": ids // 2 * 2}[chosen]
    return x.requires_grad_(), w.requires_grad_(), ids


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chosen", ["any", "one", "some"])  # "one", "some": experts without rows
def test_values_and_gradients(transposed: bool, chosen: str) -> None:
    x, w, ids = drawn(transposed, chosen)
    made = GROUPED_MATMUL(x, w, ids, 0, EXPERTS, transposed)
    true = looked_up(x, w, ids, transposed)
    torch.testing.assert_close(made, true, rtol=1e-13, atol=1e-13)
    weight = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=made.dtype)
    found = torch.autograd.grad((made * weight).sum(), (x, w))
    wanted = torch.autograd.grad((true * weight).sum(), (x, w))
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("grouped", [False, True], ids=["loop", "grouped"])
def test_shares_of_the_experts_add_up(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half computes the rows of its experts and zeros for the rest; gradients by expert."""
    # True on a GPU alone, in bfloat16.
    monkeypatch.setattr(module, "takes_grouped_matmul", lambda x, w: grouped)
    x, w, ids = (t.detach() for t in drawn(False, "some"))
    if grouped:
        x, w = x.float(), w.float()
    g = looked_up(x, w, ids, False) + 1
    half = EXPERTS // 2
    parts = [GROUPED_MATMUL(x, w[a : a + half], ids, a, EXPERTS, False) for a in (0, half)]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if grouped else {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(parts[0] + parts[1], looked_up(x, w, ids, False), **tolerance)
    mine = ids < half
    assert not parts[0][~mine].any()
    assert not parts[1][mine].any()
    gradients = [GRADIENT(x, g, ids, a, EXPERTS, half) for a in (0, half)]
    hot = torch.nn.functional.one_hot(ids, EXPERTS).to(x.dtype)
    true = torch.einsum("se,sk,sn->ekn", hot, x, g)
    torch.testing.assert_close(torch.cat(gradients), true, **tolerance)
    assert not torch.cat(gradients)[1::2].any()  # nobody chose these


def test_no_rows_at_all() -> None:
    x, w = torch.zeros(0, INNER), torch.ones(EXPERTS, INNER, OUTER)
    ids = torch.zeros(0, dtype=torch.long)
    assert GROUPED_MATMUL(x, w, ids, 0, EXPERTS, False).shape == (0, OUTER)
    assert not GRADIENT(x, torch.zeros(0, OUTER), ids, 0, EXPERTS, EXPERTS).any()
