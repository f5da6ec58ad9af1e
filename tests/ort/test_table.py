"""The table of ops in the document is that of the installed build."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from graphaccel.ort.kernels import Kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ort_table", ROOT / "docs" / "ort_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_shows_what_the_build_can_run(page: ModuleType, kernels: Kernels) -> None:
    text = page.PAGE.read_text()
    assert text == page.with_table(text, kernels), "run python docs/ort_table.py"


def test_a_page_without_marks_is_refused(page: ModuleType, kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page.with_table("no marks", kernels)
