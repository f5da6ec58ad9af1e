"""The table of ops in the document is that of the installed build."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from graphaccel.ort.kernels import Kernels
from tests.support.documents import docs_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return docs_script("measurements/ort_table")


def test_the_document_shows_what_the_build_can_run(page: ModuleType, kernels: Kernels) -> None:
    text = page.PAGE.read_text()
    assert text == page.with_table(text, kernels), "run python docs/measurements/ort_table.py"


def test_a_page_without_marks_is_refused(page: ModuleType, kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="has no lines"):
        page.with_table("no marks", kernels)
