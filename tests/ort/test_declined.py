"""What stays outside of regions says which op, why and where: the full text of `explain`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphaccel.cli import main as cli
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.ort.kernels import Kernels
from graphaccel.planner.cluster.catalogue import cluster


class Mixed(nn.Module):
    """What a region can not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        x = nn.functional.dropout(x)
        x = torch.special.erfcx(x)
        x = torch.view_as_real(torch.complex(x, x) * x)[..., 0]
        x = x.bfloat16().float()
        x = torch.cat([x, x[:0]])
        return x.square().mean()


# Lines are counted from that of `Mixed.forward`.
TEXT = textwrap.indent(
    """\
4 x aten._to_copy: ONNX Runtime {} takes no torch.bfloat16 (test_declined.py:+5)
4 x aten.view_as_real: it has no ONNX translation (test_declined.py:+4)
3 x aten.mul.Tensor: ONNX has no torch.complex64 (test_declined.py:+4)
2 x aten.slice.Tensor: it has a tensor without elements (test_declined.py:+6)
aten._conj: it has no ONNX translation (test_declined.py:+4)
aten.cat: it has a tensor without elements (test_declined.py:+6)
aten.clone: ONNX has no torch.complex64 (test_declined.py:+4)
aten.complex: it has no ONNX translation (test_declined.py:+4)
aten.native_dropout: it draws random numbers (test_declined.py:+2)
aten.slice_backward: it has a tensor without elements (test_declined.py:+6)
aten.special_erfcx: it has no ONNX translation (test_declined.py:+3)
aten.view_as_complex: it has no ONNX translation (test_declined.py:+4)
""",
    "  ",
)


def test_every_decline_names_op_reason_and_line(
    kernels: Kernels, tmp_path: Path, capsys: Any
) -> None:
    if kernels.binds(torch.bfloat16):
        pytest.skip("this build takes bfloat16")
    compiler = Compiler(Model(Mixed(), None, 2.0), cluster("cpu", 1), {"ort": "all"})
    plan = compiler.choose(as_batch((torch.randn(4, 8),))).plan
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    assert cli.main(["explain", str(file)]) == 0
    start = Mixed.forward.__code__.co_firstlineno
    shown = capsys.readouterr().out.replace(str(Path(__file__)), "test_declined.py")
    shown = re.sub(r"(?<=\.py:)\d+", lambda line: f"+{int(line[0]) - start}", shown)
    assert shown.split("outside:\n")[1].rstrip() == TEXT.format(kernels.version).rstrip()
