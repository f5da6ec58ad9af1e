"""The folders of the tests are those of the source, and are as tests/README.md says."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = {path.parent.name for path in TESTS.glob("*/__init__.py")}
MOST = 25
BESIDES = {"coverage", "docs", "examples", "gloo", "support", "validation"}
"""Folders of what is no package of graphaccel."""


def test_each_folder_is_that_of_a_package() -> None:
    packages = {path.parent.name for path in (TESTS.parent / "graphaccel").glob("*/__init__.py")}
    assert FOLDERS - BESIDES <= packages


def test_the_readme_lists_every_folder() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    assert named == FOLDERS


def test_no_folder_holds_more_files_than_can_be_read_at_a_glance() -> None:
    folders = {path.parent for path in TESTS.rglob("*.py")}
    files = {f: [p for p in f.glob("*.py") if p.name != "__init__.py"] for f in folders}
    assert {str(f): len(found) for f, found in files.items() if len(found) > MOST} == {}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


def test_one_file_reads_what_an_optimized_model_hides() -> None:
    private = re.compile(r"\.graphaccel\._\w|\._(compiler|session|gate|executors|compute)\b")
    found = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path != Path(__file__) and private.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"support/inside.py"}
