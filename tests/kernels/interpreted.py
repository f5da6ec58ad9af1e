"""Run under TRITON_INTERPRET=1: errors of every kernel against its reference, as JSON."""

import json

import torch
from torch import Tensor

from graphaccel.kernels import layer_norm as layer
from graphaccel.kernels import rms_norm as rms
from graphaccel.kernels.row_norm import launch_backward, launch_forward

EPS, P = 1e-5, 0.25
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor | None, right: Tensor, unit: float) -> None:
    assert got is not None
    assert got.dtype == right.dtype, name
    error = (got.double() - right.double()).abs().max().item()
    found[name] = (error, unit * right.abs().max().item())


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y, dx (wide), dweight, dbias by the references; without a bias of an RMS norm."""
    if bias is None:
        y, r = rms.normed(x, weight, EPS)
        return y, *rms.gradients(grad, x, weight, r, True), None
    y, mean, r = layer.normed(x, weight, bias, EPS)
    return y, *layer.gradients(grad, x, weight, bias, mean, r, (True, True))


for dtype, unit in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
    generator = torch.Generator().manual_seed(0)
    x, other, grad, more = torch.randn(4, 3, 7, 33, generator=generator).to(dtype)
    weight = torch.rand(33, generator=generator).to(dtype) + 0.5
    shift = torch.randn(33, generator=generator).to(dtype)
    table = torch.randn(11, 33, generator=generator).to(dtype)
    ids = torch.randint(0, 11, (3, 7), generator=generator)
    for kind, bias in (("rms", None), ("layer", shift)):
        centres = bias is not None
        forms = {
            "plain": {},
            "add": {"residual": other},
            "repeated": {"residual": other[:1], "more": more[0, 0]},
            "dropout": {"residual": other, "dropout": P},
            "embedding": {"residual": other[0], "ids": ids},
        }
        for form, given in forms.items():
            name = f"{kind} {form} {dtype}"
            source = table if "ids" in given else x
            made = launch_forward(source, weight, bias, EPS, centres=centres, out=dtype, **given)
            start = table[ids] if "ids" in given else x
            if made.mask is not None:
                kept = made.mask.double().mean().item()
                found[f"{name} kept"] = (abs(kept - (1 - P)), 0.07)  # four deviations of 693
                start = (start.float() * made.mask / (1 - P)).to(torch.float32)
            total = start.float()
            for addend in ("residual", "more"):
                total = total + given[addend].float() if addend in given else total
            total = total.to(dtype)
            y, dx, dweight, dbias = norm(total, weight, bias, grad)
            note(f"{name} y", made.y, y, unit)
            adds = form != "plain"
            if adds:
                note(f"{name} total", made.total, total, unit)
            got = launch_backward(
                grad, total, weight, bias, made.mean, made.r, grad_total=more if adds else None,
                mask=made.mask, dropout=P, programs=3,
            )  # fmt: skip
            dx = dx + more if adds else dx
            note(f"{name} dx", got.dx, dx.to(dtype), unit)
            note(f"{name} dweight", got.dweight, dweight, unit)
            if bias is not None:
                note(f"{name} dbias", got.dbias, dbias, unit)
            if made.mask is not None:
                note(f"{name} dropped", got.dropped, (dx * made.mask / (1 - P)).to(dtype), unit)
print(json.dumps(found))
