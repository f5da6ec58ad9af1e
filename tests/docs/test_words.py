"""Docstrings and documents use the words of the glossary in CONTRIBUTING.md."""

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
    r"lies|lie on|rests": "holds, is sharded, is on",
    r"lets? go of": "frees",
    r"(made|done|computed|gathered) again": "recomputed, gathered once more",
}


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(path: Path) -> None:
    assert _refused(path.read_text(encoding="utf-8")) == []


def test_the_words_are_found() -> None:
    assert len(_refused("A stage is told where it lies; `rests`, and lets go of it again.")) == 3
