"""Every function of the package is typed, and public ones take `Any` only where any value is meant.

Functions of fused ops and Triton kernels have the types that their class or kernel declares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphaccel

ROOT = Path(__file__).resolve().parents[2]
DECLARED_ELSEWHERE = ("kernels/ops/", "kernels/multi_tensor/triton_kernels.py")
MODULES = [
    path
    for path in sorted((ROOT / "graphaccel").rglob("*.py"))
    if not path.relative_to(ROOT / "graphaccel").as_posix().startswith(DECLARED_ELSEWHERE)
]
PUBLIC = {**graphaccel._PUBLIC, "bisect": "graphaccel.debug"}
ANY = {
    ("bisect", "batch"): "whatever the model's forward takes",
    ("full_state_dict", "return"): "PyTorch's state_dict, extra state of any kind included",
    ("load", "more"): "any value that was saved beside the model",
    ("optimize", "example_batch"): "whatever the model's forward takes",
    ("optimize", "return"): "the model's own type, with the optimizer's where one is given",
    ("plan", "example_batch"): "whatever the model's forward takes",
    ("fits", "example_batch"): "whatever the model's forward takes",
    ("fewest_devices", "example_batch"): "whatever the model's forward takes",
    ("largest_batch", "example_batch"): "whatever the model's forward takes",
    ("save", "more"): "any value that can be saved beside the model",
    ("sharding_rule", "op"): "an op of torch.ops, which has no public type",
    ("sharding_rule", "example"): "arguments of that op",
}
"""(public function, parameter) → why it takes or returns any value."""


def _annotations(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """(parameter or "return", its annotation); the first of a method is its object."""
    args = function.args
    given = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    yield from ((a.arg, a.annotation) for a in given if a and a.arg not in ("self", "cls"))
    yield "return", function.returns


def _untyped(text: str) -> list[str]:
    return [
        f"line {node.lineno}: {node.name}, {name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        for name, annotation in _annotations(node)
        if annotation is None
    ]


def _means_anything(annotation: ast.expr | None) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(annotation or ast.Pass())
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_typed(path: Path) -> None:
    assert _untyped(path.read_text(encoding="utf-8")) == []


def test_what_is_not_typed_is_found() -> None:
    text = "class A:\n    def f(self, x, *y: int, z: int): ...\n"
    assert _untyped(text) == ["line 2: f, x", "line 2: f, return"]


def test_public_functions_take_any_value_only_where_it_is_meant() -> None:
    anything = set()
    for name, module in PUBLIC.items():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                every = _annotations(node)
                anything |= {
                    (name, what) for what, annotation in every if _means_anything(annotation)
                }
    assert anything == set(ANY)
