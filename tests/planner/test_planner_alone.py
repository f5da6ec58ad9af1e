"""The planner asks for no process group and no GPU: a plan is made on any laptop."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import graphaccel.planner

SOURCES = sorted(Path(graphaccel.planner.__file__).parent.rglob("*.py"))
RUNNING = ("torch.distributed", "torch.cuda", "graphaccel.runtime", "graphaccel.passes")


def _named(tree: ast.AST) -> set[str]:
    """Dotted names that a module imports or reads."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def _of_running(source: str) -> list[str]:
    names = _named(ast.parse(source))
    return sorted(n for n in names if any(n == r or n.startswith(r + ".") for r in RUNNING))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_file_of_the_planner_names_nothing_that_runs(path: Path) -> None:
    assert _of_running(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "torch.cuda.is_available()",
        "def f():\n    from graphaccel.runtime.mesh import Mesh",
    ],
)
def test_what_runs_is_found(source: str) -> None:
    assert _of_running(source)
