"""Select oneDNN or MKL for each large float32 matmul on a CPU.

before                                     after
  %t: f32[256,768] = aten.t(%w)
  %y: f32[512,768] = aten.addmm(%b, %x, %t)  %y: f32[512,768] = mkldnn._linear_pointwise(%x, %w,
                                                                  %b, none, [], )

PyTorch's float32 matmuls go to MKL, which has AVX-512 code for Intel's processors only; those of
oneDNN, in the same package, run on any processor that has the instructions. Measured on an AMD EPYC
(Zen 4), one thread, 512 x 256 x 1024: forward 2.3 times as fast, gradients of inputs 2.4 and of
weights 2.2. Both sum in float32. A call of oneDNN costs 10 us more: small matmuls stay.
`python -m benchmarks.products` measures it on the machine it runs on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.onednn import mkl_is_slow, onednn_linear
from graphaccel.ir.program import StageProgram
from graphaccel.ir.values import operands

aten = torch.ops.aten
_FEWEST = 6e6  # FLOPs: 10 us at the 0.1 TFLOP/s that are saved, times two


def select_matmul_backend(program: StageProgram) -> StageProgram:
    """The program with its large float32 matmuls on a CPU in oneDNN, where MKL is slow."""
    if not mkl_is_slow():
        return program
    for graph in (program.forward, *program.backwards.values()):
        for node in list(graph.graph.nodes):
            if node.target in (aten.mm.default, aten.addmm.default) and _fits(node):
                _exchange(node)
        graph.graph.lint()
    return program


def _factors(node: fx.Node) -> tuple[Any, Any, Any]:
    """Bias or None, left and right operand."""
    given = operands(node)
    return (None, given[0], given[1]) if len(given) == 2 else (given[0], given[1], given[2])


def _fits(node: fx.Node) -> bool:
    bias, left, _ = _factors(node)
    value = node.meta["val"]
    if node.kwargs or value.device.type != "cpu" or value.dtype != torch.float32:
        return False
    if bias is not None and tuple(bias.meta["val"].shape) != (value.shape[1],):
        return False
    return 2 * value.numel() * left.meta["val"].shape[1] >= _FEWEST


def _exchange(node: fx.Node) -> None:
    bias, left, right = _factors(node)
    graph = node.graph
    with graph.inserting_before(node):
        if right.target is aten.t.default:
            weight = right.args[0]
        else:
            weight = graph.call_function(aten.t.default, (right,))
            weight.meta = {**node.meta, "val": right.meta["val"].t()}
        new = graph.call_function(onednn_linear(), (left, weight, bias, "none", [], ""))
    new.meta = {**node.meta, "made_by": "select_matmul_backend"}
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if right.target is aten.t.default and not right.users:
        graph.erase_node(right)
