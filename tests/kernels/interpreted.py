"""Run under TRITON_INTERPRET=1: errors of every kernel against its reference, as JSON."""

import json

import torch

from graphaccel.kernels.rms_norm import _gradients, _normed, launch_backward, launch_forward

found = {}
for dtype, unit in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
    generator = torch.Generator().manual_seed(0)
    x, other, grad, more = torch.randn(4, 7, 33, generator=generator).to(dtype)
    weight = torch.rand(33, generator=generator).to(dtype) + 0.5
    total, y, r = launch_forward(x, other, weight, 1e-5)
    wanted, factor = _normed(x + other, weight, 1e-5)
    dx, dweight = launch_backward(grad, more, total, weight, r, True, 3)
    true_dx, true_dweight = _gradients(grad, total, weight, factor, True)
    for name, got, right in (
        ("total", total, x + other),
        ("y", y, wanted),
        ("dx", dx, true_dx + more),
        ("dweight", dweight, true_dweight),
    ):
        size = right.abs().max().item()
        error = (got.double() - right.double()).abs().max().item()
        found[f"{name} {dtype}"] = (error, unit * size)
print(json.dumps(found))
