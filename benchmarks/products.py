"""One process: a GPT block's float32 products by oneDNN against PyTorch's `addmm` and `mm` (MKL).

Per product the forward, the gradient of the input and that of the weight, as the step graphs have
them. What `passes/select_matmul_backend.py` stands on: above 1 on a processor that MKL is made for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared.common import OURS, Settings, Step, run, time_sides
from graphaccel.compat.torch.onednn import onednn_linear

aten = torch.ops.aten
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
REPEATS = 10


def _mkl(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return aten.mm(left, right) if bias is None else aten.addmm(bias, left, right)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return onednn_linear()(left, right.t(), bias, "none", [], "")


def _side(settings: Settings, product: Product) -> Step:
    generator = torch.Generator().manual_seed(3)
    rows, d = settings.batch * settings.tokens, settings.width
    cases = [
        [torch.randn(*shape, generator=generator) for shape in ((rows, i), (rows, o), (o, i), (o,))]
        for i, o in ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    ]

    def step() -> float:
        total = 0.0
        for x, g, w, b in cases * REPEATS:
            results = (product(x, w.t(), b), product(g, w, None), product(g.t(), x, None))
            total += sum(r[0, :2].abs().sum().item() for r in results)
        return total

    return step


def worker(settings: Settings) -> dict[str, dict[str, Any]]:
    """Both sides on the one rank."""
    makers = {OURS: partial(_side, settings, _onednn), "MKL": partial(_side, settings, _mkl)}
    return time_sides(settings, makers)


if __name__ == "__main__":
    run("products", 1, worker)
