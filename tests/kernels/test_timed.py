"""What fused ops are timed on: within a budget, as models have them, and the bytes they move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from graphaccel.cli.fusion import timings
from graphaccel.kernels.fusion import Scalar, T, fusion
from graphaccel.kernels.register import op_of, tensors
from graphaccel.kernels.registry import fusion_named, fusions, shipped
from graphaccel.kernels.spec import Fusion
from graphaccel.kernels.timed import (
    VOCABULARY,
    backward_arguments,
    backward_call,
    shapes_of,
    traffic,
    values_of,
)
from graphaccel.planner.profile.cost import node_bytes

SHIPPED = tuple(f.name for f in shipped() if f.rewrite is None)
LOW = torch.bfloat16


@pytest.mark.parametrize("budget", [1 << 20, 1 << 26, 1 << 34])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_budget_is_kept_and_used(name: str, budget: int) -> None:
    """Also for 4096 rows of a softmax over 1024 x 1024 scores, which would be 34 GB."""
    found = traffic(fusion_named(name), LOW, shapes_of(fusion_named(name), LOW, budget, 1024))
    assert budget // 4 < max(found.forward, found.backward) <= budget


def test_sizes_are_those_of_models() -> None:
    shapes = {n: shapes_of(fusion_named(n), LOW, 1 << 34, 4096) for n in SHIPPED}
    assert dict(shapes["linear_cross_entropy"].sizes) == {"h": 4096, "v": VOCABULARY}
    assert shapes["linear_cross_entropy"].leading[0] >= 4096
    assert shapes["cross_entropy"].sizes["c"] == VOCABULARY
    assert dict(shapes["rotary"].sizes) == {"s": 4096, "d": 128}
    assert dict(shapes["rms_norm"].sizes) == {"d": 4096}
    assert shapes["swiglu"].leading[1] == 4096  # rows of it: gates have no other index


def test_inputs_are_those_of_training() -> None:
    """Tables are shared by the batch, a residual is not; no label is ignored."""
    values = {
        n: values_of(fusion_named(n), LOW, shapes_of(fusion_named(n), LOW, 1 << 20, 64))
        for n in ("rotary", "add_rms_norm", "linear_cross_entropy", "scale_mask_softmax")
    }
    assert values["rotary"]["cos"].shape[0] == 1 < values["rotary"]["x"].shape[0]
    assert values["add_rms_norm"]["residual"].shape == values["add_rms_norm"]["x"].shape
    assert values["linear_cross_entropy"]["target"].min() >= 0
    assert values["linear_cross_entropy"]["chunk"] == 0  # no pattern takes it
    assert values["scale_mask_softmax"]["mask"].shape[0] == 1


def test_bytes_by_hand() -> None:
    """Of n elements in 16 bits: the docstrings of the kernels' files."""

    def found(name: str) -> tuple[int, int, int]:
        of, shapes = fusion_named(name), shapes_of(fusion_named(name), LOW, 1 << 24, 1024)
        moved, values = traffic(of, LOW, shapes), values_of(of, LOW, shapes)
        return next(iter(values.values())).numel(), moved.forward, moved.backward

    n, forward, backward = found("swiglu")
    assert (forward, backward) == (6 * n, 10 * n)
    n, forward, backward = found("bias_gelu")
    assert (forward, backward) == (4 * n + 2048, 6 * n + 2 * 2048)
    n, forward, backward = found("rms_norm")
    per_row = n // 1024 * 4
    assert (forward, backward) == (4 * n + 2048 + per_row, 6 * n + 2 * 2048 + per_row)
    n, _, backward = found("scale_mask_softmax")
    assert backward == 6 * n


def _node(call: Any, values: list[Any], made: Any) -> fx.Node:
    """A call with the values and sizes that capture leaves on nodes."""
    graph = fx.Graph()
    arguments: list[Any] = []
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            value, like = graph.placeholder(f"x{i}"), value
            value.meta |= {"val": like, "dims": tuple(like.shape)}
        arguments.append(value)
    node = graph.call_function(call, tuple(arguments))
    several = tuple(tensors(made))
    node.meta |= {"val": several, "dims": tuple(tuple(m.shape) for m in several)}
    return node


@pytest.mark.parametrize("name", SHIPPED)
def test_bytes_are_those_that_the_planner_counts(name: str) -> None:
    of = fusion_named(name)
    shapes = shapes_of(of, torch.float32, 1 << 18, 64)
    values = values_of(of, torch.float32, shapes)
    op, moved = op_of(of), traffic(of, torch.float32, shapes)
    made = op(*values.values())
    assert node_bytes(_node(op, list(values.values()), made)) == moved.forward
    if not of.inline:  # the planner counts what it is made of
        given = list(backward_arguments(of, values, tensors(made)).values())
        call = backward_call(of)
        assert node_bytes(_node(call, given, call(*given))) == moved.backward


def _made(**changes: Any) -> Fusion:
    parts = {
        "inputs": {"x": T("... d"), "times": Scalar(2, (3,)), "unused": Scalar(0, (1,))},
        "outputs": {"y": T("... d")},
        "devices": (),
        "pattern": lambda x, times: x * times,
        "forward": lambda x, times, unused: x * times,
    }
    name = f"timed_{'_'.join(changes) or 'plain'}"
    fusion(type(name, (), {**parts, **changes}))
    return next(f for f in fusions() if f.name == name)


def test_a_number_that_no_pattern_takes_has_its_default() -> None:
    found = timings(_made(), "cpu", torch.float32, budget=1 << 12)
    assert found["forward"]["bytes"] == 2 << 10  # 256 numbers in, and out
    assert found["forward and backward"]["bytes"] == 5 << 10  # and x, dy and dx
    assert all(e["eager"] > 0 and e["fused"] > 0 for e in found.values())


def test_the_head_and_loss_are_timed() -> None:
    found = timings(fusion_named("linear_cross_entropy"), "cpu", torch.float32, budget=1 << 14)
    assert list(found) == ["forward", "forward and backward"]


def test_an_op_that_takes_no_such_sizes_has_those_it_is_checked_with() -> None:
    only = _made(sizes={"d": (8, 16)}, legal=lambda x, **_: None if x.shape[-1] < 20 else "wide")
    shapes = shapes_of(only, torch.float32, 1 << 20, 1024)
    assert dict(shapes.sizes) == {"d": 16}
    assert shapes.leading == (1 << 12,)


def test_an_op_that_gives_no_gradient_has_no_backward() -> None:
    counted = _made(inputs={"x": T("... d", grad=False), "times": Scalar(2), "unused": Scalar(0)})
    assert list(timings(counted, "cpu", torch.float32, budget=1 << 12)) == ["forward"]
