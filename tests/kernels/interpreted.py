"""Run under TRITON_INTERPRET=1: errors of every kernel against its reference, as JSON."""

import json
from typing import Any

import torch
from torch import Tensor

from graphaccel.kernels.multi_tensor.steps import AdamRule, Around, MultiTensor, SGDRule
from graphaccel.kernels.ops import embedding_norm
from graphaccel.kernels.ops import layer_norm as layer
from graphaccel.kernels.ops import rms_norm as rms
from graphaccel.kernels.ops.row_norm import launch_backward, launch_forward

EPS, P = 1e-5, 0.25
found: dict[str, tuple[float, float]] = {}


def note(name: str, got: Tensor | None, right: Tensor, unit: float) -> None:
    assert got is not None
    assert got.dtype == right.dtype, name
    error = (got.double() - right.double()).abs().max().item()
    rounding = torch.finfo(torch.float16).eps if right.dtype == torch.float16 else 0.0
    found[name] = (error, max(unit, rounding) * right.abs().max().item())


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


def differs(name: str, got: Tensor, right: Tensor) -> None:
    """Of what may be empty or NaN: the same, to a few units."""
    alike = got.shape == right.shape and torch.allclose(got, right, 1e-5, 1e-5, equal_nan=True)
    found[name] = (float(not alike), 0.0)


generator = torch.Generator().manual_seed(3)
x, weight, bias = (torch.randn(s, generator=generator) for s in ((2, 3, 5, 33), (33,), (33,)))
for shape in ((), (1,), (1, 1, 1), (5, 1), (3, 1, 33), (2, 1, 1, 1), (1, 33)):  # how it repeats
    for name in ("residual", "more"):
        other = torch.randn(shape, generator=generator)
        given = {"residual": torch.zeros(33)} | {name: other}
        made = launch_forward(x, weight, bias, EPS, centres=True, out=x.dtype, **given)
        assert made.total is not None
        differs(f"{name} {shape} total", made.total, x + other)
        differs(f"{name} {shape} y", made.y, layer.normed(x + other, weight, bias, EPS)[0])

empty = x[:0]
for p in (None, P):
    made = launch_forward(
        empty, weight, bias, EPS, centres=True, out=x.dtype, residual=empty, dropout=p
    )
    back = launch_backward(
        empty, empty, weight, bias, made.mean, made.r, mask=made.mask, dropout=P, programs=3
    )
    for name, value in (("total", made.total), ("y", made.y), ("dx", back.dx)):
        assert value is not None
        differs(f"no rows {name} {p}", value, empty)
    for name, value in (("dweight", back.dweight), ("dbias", back.dbias)):
        assert value is not None
        differs(f"no rows {name} {p}", value, torch.zeros(33))
    assert (back.dropped is None) == (p is None)
unasked = launch_backward(
    empty, empty, weight, bias, made.mean, made.r, wanted=(False, False), programs=3
)
assert unasked.dweight is None
assert unasked.dbias is None

table = torch.randn(11, 33, generator=generator)
room = torch.cat([torch.ones(1, 33), table, torch.ones(1, 33)])  # what lies around it
ids = torch.tensor([0, 11, 10, -1, 3])
names = torch.tensor([True, False, True, False, True])
made = launch_forward(room[1:12], weight, bias, EPS, centres=True, out=table.dtype, ids=ids)
right, *_ = layer.normed(table[ids.clamp(0, 10)], weight, bias, EPS)
differs("ids out of bounds", made.y, torch.where(names[:, None], right, torch.nan))
inside = embedding_norm.bounded(ids, table, -1)
differs("ids in the backward", inside.double(), torch.tensor([0, -1, 10, -1, 3]).double())

SHAPES = ((40_000,), (3,), (2049,))  # two chunks; less than a block; a block and one
NUMBERS = {"adamw": True, "adam": False}


def optimized(kind: str, kernels: bool, wide: torch.dtype, around: dict[str, Any]) -> list[Tensor]:
    """Weights, states and gradients after two steps; the second may be left out."""
    generator = torch.Generator().manual_seed(1)
    params, copies = [], []
    for s in SHAPES:
        params.append(torch.randn(s, generator=generator).to(wide))
        copies.append(torch.zeros(s, dtype=torch.float16))
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]
    many = MultiTensor(kernels=kernels)
    for turn in range(2):
        grads = [torch.randn(s, generator=generator).to(wide) for s in SHAPES]
        if turn and "max_norm" in around:
            grads[1][0] = float("nan")
        given = Around(**around, copies=copies)
        if kind in NUMBERS:
            numbers = (0.9, 0.99, 1e-8)
            own = NUMBERS[kind]
            rules = [AdamRule(0.1 / (i + 1), *numbers, 0.1 * i, own) for i in range(3)]
            many.adam(params, grads, *states, steps, rules, given)
        else:
            rules = [SGDRule(0.1, 0.9, 0.1, kind == "nesterov", 0.1 * i) for i in range(3)]
            many.sgd(params, grads, states[0], [turn == 0] * 3, rules, given)
    return [*params, *states[0], *states[1], *copies, *grads, torch.stack(steps)]


CLIPPED = {"scale": torch.tensor(4.0), "max_norm": 1.0, "finite": True, "zero": True}
for kind in ("adamw", "adam", "momentum", "nesterov"):
    for form, wide, around in (
        ("plain", torch.float32, {}),
        ("plain", torch.float64, {}),
        (
            "clipped",
            torch.float32,
            {"scale": torch.tensor(4.0), "max_norm": 1.0, "finite": True, "zero": True},
        ),
    ):
        pairs = zip(
            optimized(kind, True, wide, around), optimized(kind, False, wide, around), strict=True
        )
        for i, (got, right) in enumerate(pairs):
            note(f"{kind} {form} {wide} {i}", got, right, 1e-11 if wide == torch.float64 else 1e-5)
print(json.dumps(found))
