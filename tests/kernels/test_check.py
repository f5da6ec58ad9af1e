"""`fusion check` catches every planted fault, and passes the op they were planted in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphaccel.errors import BadFusion
from graphaccel.kernels.check.numbers import check_numbers
from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.spec import Fusion


def softmax_parts() -> dict[str, Any]:
    """A right scale + mask + softmax; each fault below replaces a part of it."""

    def forward(x: Any, mask: Any, scale: float) -> Any:
        return torch.softmax(x.float() * scale + mask.float(), -1).to(x.dtype).contiguous()

    def backward(grad_y: Any, y: Any, scale: float) -> Any:
        g, p = grad_y.float(), y.float()
        return ((g - (g * p).sum(-1, keepdim=True)) * p * scale).to(y.dtype).contiguous()

    return {
        "inputs": {
            "x": T("... q k"),
            "mask": T("... q k", grad=False, mask=True),
            "scale": Scalar(0.7),
        },
        "outputs": {"y": T("... q k")},
        "whole": ("k",),
        "devices": (),  # "auto" must not place it in the models of other tests
        "pattern": lambda x, mask, scale: torch.softmax(x * scale + mask, -1),
        "forward": forward,
        "backward": backward,
        "fake": lambda x, mask, scale: x.new_empty(x.shape),
        "fake_backward": lambda grad_y, y, scale: y.new_empty(y.shape),
    }


def square_parts() -> dict[str, Any]:
    """A right (x + bias)², of which the sum is an output too: several inputs and outputs."""

    def forward(x: Any, bias: Any) -> Any:
        total = (x + bias).contiguous()
        return total, total.square()

    return {
        "inputs": {"x": T("... d"), "bias": T("d")},
        "outputs": {"total": T("... d", optional=True), "y": T("... d")},
        "devices": (),
        "pattern": lambda x, bias: (x + bias, (x + bias).square()),
        "forward": forward,
        "backward": square_gradients,
    }


def square_gradients(grad_total: Any, grad_y: Any, total: Any, wanted: Any) -> Any:
    dx = (grad_y * total).mul_(2)
    dx = (dx if grad_total is None else dx.add_(grad_total)).contiguous()
    return dx, dx.flatten(0, -2).sum(0) if wanted[1] else None


def made(name: str, **parts: Any) -> Fusion:
    """The right softmax, with other parts; or the right square, where `of` says so."""
    right_parts = {"softmax": softmax_parts, "square": square_parts}[parts.pop("of", "softmax")]
    return fusion(type(name, (), {**right_parts(), **parts}))


def right(x: Any, mask: Any, scale: float) -> Any:
    return softmax_parts()["forward"](x, mask, scale)


def flat(x: Any, mask: Any, scale: float) -> Any:
    """Reads memory as if it were contiguous."""
    rows = torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).float()
    return torch.softmax(rows * scale + mask.float(), -1).to(x.dtype)


def no_maximum(x: Any, mask: Any, scale: float) -> Any:
    e = torch.exp(x.float() * scale + mask.float())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def first_mask_row(x: Any, mask: Any, scale: float) -> Any:
    return right(x, mask[..., :1, :].expand(mask.shape), scale)


def without_tail(x: Any, mask: Any, scale: float) -> Any:
    y = right(x, mask, scale)
    if y.shape[-1] % 2:
        y[..., -1] = 0
    return y


def writes_input(x: Any, mask: Any, scale: float) -> Any:
    y = right(x, mask, scale)
    x.mul_(scale)
    return y


def restless(x: Any, mask: Any, scale: float) -> Any:
    y = right(x, mask, scale)
    return y + torch.rand_like(y) * torch.finfo(y.dtype).eps * 0.5


def as_rows(x: Any, bias: Any) -> Any:
    """Its strides are those of x where that is two-dimensional, and so its own rows."""
    rows = x.reshape(-1, x.shape[-1])
    total = torch.add(rows, bias, out=torch.empty_like(rows)).view(x.shape)
    return total, total.square().contiguous()


def writes_back(grad_y: Any, y: Any, scale: float) -> Any:
    made = GRADIENT(grad_y, y, scale)
    if grad_y.is_contiguous():
        grad_y.mul_(2)
    return made


def flat_back(grad_y: Any, y: Any, scale: float) -> Any:
    rows = torch.as_strided(grad_y, y.shape, torch.empty(y.shape).stride())
    return GRADIENT(rows if grad_y.stride(-1) else grad_y, y, scale)


GRADIENT = softmax_parts()["backward"]
FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "backward lacks the scale": lambda: {
        "backward": lambda grad_y, y, scale: GRADIENT(grad_y, y, 1.0)
    },
    "mask dropped": lambda: {"forward": lambda x, mask, scale: right(x, mask * 0, scale)},
    "mask broadcast wrongly": lambda: {"forward": first_mask_row},
    "takes memory to be contiguous": lambda: {"forward": flat},
    "no maximum subtracted": lambda: {"forward": no_maximum},
    "another dtype": lambda: {
        "forward": lambda x, mask, scale: right(x, mask, scale).float(),
        "fake": lambda x, mask, scale: x.new_empty(x.shape, dtype=torch.float32),
    },
    "the fake's stride": lambda: {
        "fake": lambda x, mask, scale: (
            x.new_empty(x.shape).transpose(-1, -2).contiguous().transpose(-1, -2)
        )
    },
    "the tail is skipped": lambda: {"forward": without_tail},
    "a bias of a thousandth": lambda: {
        "forward": lambda x, mask, scale: right(x, mask, scale) * 1.001
    },
    "other bits when repeated": lambda: {"forward": restless},
    "NaN made zero": lambda: {
        "forward": lambda x, mask, scale: right(x, mask, scale).nan_to_num(0.0)
    },
    "writes to its input": lambda: {"forward": writes_input},
    "backward of another dim": lambda: {
        "backward": lambda grad_y, y, scale: (
            (grad_y - (grad_y * y).sum(-2, keepdim=True)) * y * scale
        )
    },
    "gradient of zero": lambda: {
        "backward": lambda grad_y, y, scale: torch.zeros_like(y).contiguous()
    },
    "half precision squared": lambda: {
        "backward": lambda grad_y, y, scale: GRADIENT(grad_y.half(), y.half(), scale).to(y.dtype)
    },
    "the fake follows the gradient": lambda: {
        "fake_backward": lambda grad_y, y, scale: torch.empty_like(grad_y)
    },
    "takes gradients to be contiguous": lambda: {"backward": flat_back},
    "writes to its gradient": lambda: {"backward": writes_back},
    "asks for the wrong input": lambda: {
        "of": "square",
        "backward": lambda grad_total, grad_y, total, wanted: square_gradients(
            grad_total, grad_y, total, (wanted[1], wanted[0])
        ),
    },
    "the bias only with x": lambda: {
        "of": "square",
        "backward": lambda grad_total, grad_y, total, wanted: square_gradients(
            grad_total, grad_y, total, wanted if wanted[0] else (False, False)
        ),
    },
    "a gradient that may be missing": lambda: {
        "of": "square",
        "backward": lambda grad_total, grad_y, total, wanted: square_gradients(
            grad_total + 0, grad_y, total, wanted
        ),
    },
    "an optional gradient left out alone": lambda: {
        "of": "square",
        "backward": lambda grad_total, grad_y, total, wanted: square_gradients(
            None if not grad_y.any() else grad_total, grad_y, total, wanted
        ),
        "fake_backward": square_gradients,
    },
    "strides of its rows": lambda: {
        "of": "square",
        "forward": as_rows,
        "fake": lambda x, bias: (x.new_empty(x.shape), x.new_empty(x.shape)),
    },
}


def test_the_right_one_passes() -> None:
    count, faults = check_numbers(made("softmax_without_fault"))
    assert count == 54
    assert not faults, faults
    count, faults = check_numbers(made("square_without_fault", of="square"))
    assert count == 45
    assert not faults, faults


@pytest.mark.parametrize("fault", list(FAULTS))
def test_every_planted_fault_is_caught(fault: str) -> None:
    try:
        planted = made("softmax_" + fault.replace(" ", "_").replace("'", ""), **FAULTS[fault]())
    except BadFusion:
        return  # refused when it is defined
    _, faults = check_numbers(planted)
    assert faults


def test_a_missing_gradient_is_seen() -> None:
    """The mask gets a gradient in eager, and the op declares that it gives none: a match is then
    refused (test_fuse); an op that declares one and returns None is a fault."""
    parts = softmax_parts()
    parts["inputs"] = parts["inputs"] | {"mask": T("... q k", mask=True)}
    parts["backward"] = lambda grad_y, y, scale: (GRADIENT(grad_y, y, scale), None)
    parts["fake_backward"] = None
    try:
        planted = fusion(type("softmax_mask_gradient_missing", (), parts))
    except BadFusion:
        return
    assert check_numbers(planted)[1]


def _dropping(name: str, factor: float = 1.0) -> Fusion:
    """Dropout and a sum, of numbers of its own as kernels for GPUs draw them: not eager's."""

    def forward(x: Any, residual: Any, p: float) -> Any:
        mask = torch.rand(x.shape, device=x.device) >= p
        return (x * mask / (1 - p) + factor * residual).to(x.dtype).contiguous(), mask

    parts = {
        "inputs": {"x": T("... d"), "residual": T("... d"), "p": Scalar(0.3)},
        "outputs": {"y": T("... d")},
        "saved": {"mask": T("... d", dtype="bool")},
        "devices": (),
        "random": True,
        "kept": lambda mask, **_: mask,
        "pattern": lambda x, residual, p: torch.native_dropout(x, p, True)[0] + residual,
        "forward": forward,
        "backward": lambda grad_y, mask, p: (
            (grad_y * mask / (1 - p)).to(grad_y.dtype).contiguous(),
            grad_y.clone(memory_format=torch.contiguous_format),
        ),
        "fake": lambda x, residual, p: (
            x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool),
        ),
        "fake_backward": lambda grad_y, mask, p: (
            grad_y.new_empty(grad_y.shape), grad_y.new_empty(grad_y.shape),
        ),
    }  # fmt: skip
    return fusion(type(name, (), parts))


def test_eager_drops_what_an_op_with_numbers_of_its_own_drops() -> None:
    own = _dropping("dropping_own_numbers")
    assert not check_numbers(own, own_random=True)[1]
    assert check_numbers(own)[1], "eager's numbers are others"
    wrong = _dropping("dropping_wrong_sum", factor=0.9)
    assert any("output `y`" in fault.what for fault in check_numbers(wrong, own_random=True)[1])
