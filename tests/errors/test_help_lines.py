"""Code in help lines: it compiles, and the names of torch's and ours in it exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch

import graphaccel
from graphaccel import errors
from tests.errors.test_classes import CASES

COMMANDS = ("graphaccel ", "python", "pip ", "export ", "unset ", "GRAPHACCEL_")
ROOTS = {"torch": torch, "graphaccel": graphaccel}


def _code(line: str) -> str:
    """What can be pasted of a help line: what stands behind its colon and two blanks."""
    return line.partition(":  ")[2] or line


def _python(line: str) -> str | None:
    """The same, if it is meant to be Python: a call, an assignment, a statement."""
    text = _code(line)
    if text.startswith(COMMANDS) or re.match(r"[A-Z_]+=", text) or not re.search(r"[(=]", text):
        return None
    return text if re.match(r"[\w.@]+( |\(|=|\[|\.)|(if|with|def|return|for) ", text) else None


LINES = sorted({line for error, _ in CASES for line in error.message().help})
PYTHON = [line for line in LINES if ":  " in line and _python(line)]
SHELL = [line for line in LINES if _code(line).startswith(COMMANDS[:1])]


def test_there_are_lines() -> None:
    assert len(PYTHON) > 20
    assert len(SHELL) > 3


@pytest.mark.parametrize("line", PYTHON)
def test_python_compiles_and_names_what_exists(line: str) -> None:
    code = _python(line)
    assert code is not None
    nodes = [node for part in code.split("  ") for node in ast.walk(_parsed(part))]
    for node in nodes:
        if isinstance(node, ast.Import):
            for module in node.names:
                importlib.import_module(module.name)
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node).split(".")
            if path[0] in ROOTS and all(part.isidentifier() for part in path):
                _reached(ROOTS[path[0]], path[1:])


def _parsed(code: str) -> ast.AST:
    """A statement, or arguments of a call: `microbatches=1`, `data=1, microbatches=1`."""
    for text in (code, f"f({code})", f"{code}\n    pass", f"def f():\n    {code}"):
        try:
            return ast.parse(textwrap.dedent(text))
        except SyntaxError:
            continue
    raise AssertionError(f"this does not compile: {code}")


def _reached(root: Any, names: list[str]) -> None:
    for name in names:
        assert hasattr(root, name), f"{root} has no {name}"
        root = getattr(root, name)


def test_commands_have_the_options_they_are_shown_with() -> None:
    """By the parser: `--help` of each command lists them."""
    helps: dict[str, str] = {}
    for line in SHELL:
        command, *words = _code(line).split()[1:]
        if command not in helps:
            run = [sys.executable, "-m", "graphaccel", command, "--help"]
            helps[command] = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        for word in words:
            if word.startswith("--"):
                assert word in helps[command], line


def test_every_error_of_a_batch_that_does_not_divide_says_drop_last() -> None:
    for allowed in ((), (1, 2)):
        error = errors.BatchNotDivisible(batch=7, microbatches=2, data=2, allowed=allowed)
        assert "drop_last=True" in str(error)
