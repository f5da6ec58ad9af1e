"""Names, docstrings and documents use the words of the glossary in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "graphaccel").rglob("*.py"))
DOCUMENTS = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*.md"))
    if path.name != "CHANGELOG.md"
)  # fmt: skip
INSTEAD = {
    r"(is|are|was|were|be|been) told": "is passed, reports, says",
    r"lies|lie on|rests|(they|that|parameters|weights|head|which) rest(?! of)": "holds, is on",
    r"lets? go of": "frees",
    r"(made|done|computed|gathered) again": "recomputed, gathered once more",
}


NAMES = {
    "again": "recomputation, or what is repeated",
    "alike": "equal, identical, a kind",
    "away": "offloaded",
    "crowd": "oversubscription",
    "drafts": "a cache",
    "flying": "in flight",
    "found": "what it is: a site, a device, a checkpoint",
    "guess": "an estimate, a heuristic",
    "lies": "is sharded, its layout",
    "lying": "held, live",
    "made": "computed, or what it is",
    "motion": "bytes in flight",
    "products": "matmuls",
    "promising": "a queue, a bound",
    "remade": "recomputed",
    "resting": "held, how parameters are sharded",
    "rests": "is sharded, is full",
    "told": "a key, a description",
    "twin": "a copy, an equal stage",
    "twins": "copies, equal stages",
    "wires": "costs of collectives",
    "works": "costs",
}
"""Words of the former dialect in names → what to say."""
KEPT = {
    "Chunks.products": "of a user's fused op",
    "Device.crowd": "a key of cluster files",
    "Around.found_inf": "torch's word",
    "found_inf": "torch's word",
}
"""Names that stay, and why."""


def _names(text: str) -> Iterator[str]:
    """Names of functions, classes (with "Class.") and fields."""

    def of(body: list[ast.stmt], owner: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield owner + node.name
                if isinstance(node, ast.ClassDef):
                    yield from of(node.body, f"{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and owner:
                yield owner + node.target.id

    yield from of(ast.parse(text).body, "")


def _locals(text: str) -> Iterator[str]:
    """Names that functions bind: parameters, variables, nested functions."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.Lambda)):
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    yield node.arg
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id
                elif isinstance(node, ast.FunctionDef) and node is not function:
                    yield node.name


def _refused_names(text: str) -> list[str]:
    return [
        f"{name}: say {NAMES[word]}"
        for name in dict.fromkeys((*_names(text), *_locals(text)))
        if name not in KEPT
        for word in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).lower().split("_")
        if word in NAMES
    ]


def _docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node.value.value


def _refused(text: str) -> list[str]:
    """What of a text is not to be said; code in it is left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [
        f"{match[0]!r}: say {instead}"
        for words, instead in INSTEAD.items()
        for match in re.finditer(rf"\b({words})\b", prose)
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings(path: Path) -> None:
    assert [said for text in _docstrings(path) for said in _refused(text)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names(path: Path) -> None:
    assert _refused_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(path: Path) -> None:
    assert _refused(path.read_text(encoding="utf-8")) == []


def test_the_words_are_found() -> None:
    assert len(_refused("A stage is told where it lies; `rests`, and lets go of it again.")) == 3


def test_the_names_are_found() -> None:
    text = "class Twins:\n    found: int\n    def _again(self, told):\n        held = made = 1\n"
    assert [name.partition(":")[0] for name in _refused_names(text)] == [
        "Twins", "Twins.found", "Twins._again", "told", "made",
    ]  # fmt: skip
