"""The rule that GA301 offers: a call that can be pasted, for ops of every kind of signature."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphaccel
from graphaccel.report.rule_form import rule_form
from graphaccel.sharding.rules.custom import own_rule
from graphaccel.sharding.rules.notation import shape_of
from graphaccel.sharding.rules.prove import call_node

SIGNATURES = {
    "row(Tensor x) -> Tensor": (lambda x: x / x.sum(-1, keepdim=True), (8, 4)),
    "row.by(Tensor x, float by) -> Tensor": (lambda x, by: (by * x).softmax(-1), (8, 4), 2.0),
    "pair(Tensor x, Tensor w, bool up) -> (Tensor, Tensor)": (
        lambda x, w, up: (x @ w, (x * x).sum(-1)), (8, 4), (4, 6), True,
    ),
    "seen(Tensor x, Tensor[] more, int? most, int[] sizes) -> Tensor": (
        lambda x, more, most, sizes: x + more[0], (8, 4), [(8, 4)], None, [8, 4],
    ),
    "total(Tensor x) -> Tensor": (lambda x: x.sum(), (8, 4)),
    "number(Tensor x, Tensor t) -> Tensor": (lambda x, t: x * t, (8, 4, 4), ()),
}  # fmt: skip


def _made(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [torch.randn(v) for v in value]
    return torch.randn(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("signature", SIGNATURES)
def test_the_line_can_be_pasted(signature: str) -> None:
    function, *arguments = SIGNATURES[signature]
    library = torch.library.Library("ruleform", "FRAGMENT")
    library.define(signature)
    name, _, overload = signature.split("(")[0].partition(".")
    library.impl(signature.split("(")[0], function, "CompositeExplicitAutograd")
    target = getattr(getattr(torch.ops.ruleform, name), overload or "default")
    node = call_node(target, tuple(map(_made, arguments)), {})
    assert own_rule(node) is None
    exec(f"graphaccel.sharding_rule({rule_form(node)})", {"torch": torch, "graphaccel": graphaccel})
    rule = own_rule(node)
    assert rule is not None
    assert rule.inputs[0][0] == "n"
    assert "n" not in rule.whole
    assert len(rule.inputs[0]) == len(shape_of(node.all_input_nodes[0]))
