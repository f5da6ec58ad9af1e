"""Drafts a `graphaccel.sharding_rule` call for an op without a rule.

    mylib.op(f32[8,64], 2)
      ->  "mylib::op", "n a -> n a", whole="a", example=(torch.randn(8, 64, ...), 2)

It can be pasted as it is: the leading dim of the first tensor is assumed to be the batch, wherever
it leads, and every other dim cannot be sharded. Running the call checks whether that holds.
"""

from __future__ import annotations

from collections import Counter
from string import ascii_lowercase
from typing import Any

import torch
from torch import fx

from graphaccel.sharding.rules.notation import output_shapes, shape_of, tensor_arguments

_NAMES = [c for c in ascii_lowercase if c != "n"]


def rule_form(node: fx.Node) -> str:
    """The arguments of the call, as Python."""
    shapes = [tuple(shape_of(n)) for n in tensor_arguments(node)]
    results = [tuple(s) for s in output_shapes(node)]
    leads = next((s[0] for s in shapes if s), None)
    known: dict[tuple[int, int], str] = {}

    def spelled(shape: tuple[int, ...]) -> str:
        names, seen = [], Counter[int]()
        for place, size in enumerate(shape):
            if place == 0 and size == leads:
                names.append("n")
                continue
            seen[size] += 1
            names.append(known.setdefault((size, seen[size]), _name(len(known))))
        return " ".join(names)

    sides = [", ".join(map(spelled, side)) for side in (shapes, results)]
    whole = f'whole="{" ".join(known.values())}", ' if known else ""
    example = ", ".join(map(_example, node.args))
    comma = "," if len(node.args) == 1 else ""
    return f'"{_called(node.target)}", "{" -> ".join(sides)}", {whole}example=({example}{comma})'


def _name(number: int) -> str:
    return _NAMES[number] if number < len(_NAMES) else f"a{number}"


def _called(target: Any) -> str:
    """`aten::add.Tensor`, `mylib::scan`."""
    name = str(target.name()) if hasattr(target, "name") else str(target)
    return name.removesuffix(".default")


def _example(value: Any) -> str:
    """Python code for an argument like this one."""
    if isinstance(value, fx.Node):
        tensor = value.meta["val"]
        shape = ", ".join(map(str, shape_of(value))) if tensor.dim() else "()"
        if tensor.is_floating_point():
            return f"torch.randn({shape}, dtype=torch.float64)"
        return f"torch.zeros({shape}, dtype={tensor.dtype})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_example, value))}]"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return repr(value)
