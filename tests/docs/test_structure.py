"""Bars on the size of files, functions and folders, which keep each of them one purpose."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, TEST_LINES = 450, 400
FUNCTION_LINES = 60
FOLDER_FILES = 25
TOP_MODULES = 8


def test_no_file_is_too_long() -> None:
    long = {
        name: lines
        for name, lines in ((name, len(text.splitlines())) for name, text in sources().items())
        if lines > (TEST_LINES if name.startswith("tests/") else FILE_LINES)
    }
    assert not long


def test_no_function_is_too_long() -> None:
    long = {
        f"{name}: {node.name}": lines
        for name, text in sources().items()
        for node, lines in functions(ast.parse(text))
        if lines > FUNCTION_LINES
    }
    assert not long


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types alone count too."""
    imports, graph = grimp.build_graph("graphaccel", cache_dir=None), nx.DiGraph()
    for module in imports.modules:
        used = imports.find_modules_directly_imported_by(module)
        graph.add_edges_from((module, other) for other in used)
    circles = [sorted(own) for own in nx.strongly_connected_components(graph) if len(own) > 1]
    assert len(graph) > 100
    assert not circles


def test_no_folder_has_too_many_files() -> None:
    files = Counter(
        str(Path(name).parent) for name in sources() if not name.endswith("/__init__.py")
    )
    files["docs"] = sum(path.is_file() for path in (ROOT / "docs").iterdir())
    assert not {name: count for name, count in files.items() if count > FOLDER_FILES}


def test_the_top_level_is_packages_and_few_modules() -> None:
    modules = [path.name for path in (ROOT / "graphaccel").glob("*.py")]
    assert len(modules) <= TOP_MODULES, modules


def test_a_long_function_is_counted() -> None:
    """Decorators do not count, docstrings do."""
    body = "    pass\n" * 5
    (made,) = functions(ast.parse(f'@decorator\ndef f(\n    a,\n):\n    """One."""\n{body}'))
    assert made[1] == 9


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function of a module, with its lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield node, lines


@cache
def sources() -> dict[str, str]:
    """Path → text of every Python file of the project."""
    folders = ("graphaccel", "tests", "benchmarks", "examples", "docs")
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
