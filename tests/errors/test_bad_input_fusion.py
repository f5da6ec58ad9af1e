"""Fusions that are wrong, and kernels that fail while they run: class and full text."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphaccel
from graphaccel import errors
from graphaccel.kernels.fusion import fusion
from graphaccel.kernels.registry import fusions
from tests.support.small import DOUBLED, Classifier, small_batch, used_optimizer
from tests.support.untouched import plain_places, refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "branches_on_data": (
        {"pattern": lambda x: x if x.sum() > 0 else -x},
        "its pattern can not be traced without data: DataDependentOutputException: aten._local_scalar_dense.default",
    ),
    "widens": (
        {"forward": lambda x: (x * 2).double()},
        "it would change dtype torch.float32 to torch.float64 (output `y`)",
    ),
    "fakes_a_shape": (
        {"fake": lambda x: x[..., :1].clone()},
        "its fake says shape (3, 5, 1), the kernel gives (3, 5, 6) (output `y`)",
    ),
    "fakes_a_stride": (
        {"fake": lambda x: x.new_empty(x.shape[::-1]).permute(*range(x.dim() - 1, -1, -1))},
        "its fake says stride (1, 3, 15), the kernel gives (30, 6, 1) (output `y`)",
    ),
    "fakes_a_gradient": (
        {
            "backward": lambda grad_y, x, wanted: grad_y.double(),
            "fake_backward": lambda grad_y, x, wanted: grad_y.clone(),
        },
        "its fake of the backward says dtype torch.float32, the kernel gives torch.float64 (gradient of `x`)",
    ),
    "rms_norm": ({}, "an op of this name is registered already"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_when_it_is_registered(name: str) -> None:
    fusions()  # those of the package have their names
    changes, reason = REFUSED[name]
    with pytest.raises(errors.BadFusion) as caught:
        fusion(type(name, (), {**DOUBLED, **changes}))
    assert (
        str(caught.value)
        == f"""\
error[GA701]: the fusion `{name}` is refused: {reason}
  help: a fusion that works, to start from:  graphaccel fusion new NAME
  explain: graphaccel explain GA701"""
    )
    assert name == "rms_norm" or name not in {f.name for f in fusions()}


def test_a_class_that_is_refused_is_shown() -> None:
    with pytest.raises(errors.BadFusion) as caught:

        @fusion
        class shown_in_the_error:
            inputs = DOUBLED["inputs"]
            outputs = DOUBLED["outputs"]
            devices = ()

            def pattern(x: Any) -> Any:
                return x * 2

            def forward(x: Any) -> Any:
                return (x * 2).double()

    location = caught.value.location
    assert location is not None
    number = location.line
    assert (
        plain_places(str(caught.value))
        == f"""\
error[GA701]: the fusion `shown_in_the_error` is refused: it would change dtype torch.float32 to torch.float64 (output `y`)
  --> test_bad_input_fusion.py:{number}
{number:>5} |         class shown_in_the_error:
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^
  help: a fusion that works, to start from:  graphaccel fusion new NAME
  explain: graphaccel explain GA701"""
    )


def test_a_kernel_that_fails_while_it_runs() -> None:
    """Named with what it was called with, and how to do without it; nothing is changed."""
    rows = 8

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == rows and x.abs().sum() > 0:  # not in the checks of the registration
            raise RuntimeError("out of registers")
        return torch.tanh(x).mul_(2)

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    parts = {**DOUBLED, "pattern": lambda x: torch.tanh(x) * 2, "forward": forward, "fake": fake}
    fusion(type("out_of_registers", (), parts))

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2

    model, batch = Classifier(Doubled()), small_batch()
    optimizer = used_optimizer(model, batch)
    graphaccel.optimize(model, optimizer, example_batch=batch, fusions="out_of_registers")
    text = """\
error[GA702]: the fused op `out_of_registers` failed
  called with: 8x8 float32
  RuntimeError: out of registers
  help: without this fusion:  graphaccel.optimize(model, optimizer, fusions=("auto", "-out_of_registers"))
  help: its checks on this machine:  graphaccel fusion check out_of_registers
  explain: graphaccel explain GA702"""
    with refused(errors.KernelFailed, text, model, optimizer):
        model(*batch)


def test_a_name_that_is_not_registered() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = used_optimizer(model, batch)
    with pytest.raises(errors.UnknownFusion) as caught:
        graphaccel.optimize(model, optimizer, example_batch=batch, fusions="rmsnorm")
    lines = str(caught.value).splitlines()
    assert lines[0] == "error[GA703]: no fusion named `rmsnorm`"
    assert lines[2] == "  help: did you mean:  rms_norm"
    assert type(model) is Classifier
