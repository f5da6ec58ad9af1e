"""What holds for all error classes: fields, pickling, pages, and the source line shown."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphaccel import errors
from graphaccel.errors.messages import Location, format_bytes
from tests.errors.texts import (
    test_capture_texts,
    test_checkpoint_texts,
    test_compile_texts,
    test_data_texts,
    test_ort_texts,
    test_plan_texts,
    test_run_texts,
    test_state_texts,
)

ROOT = Path(__file__).parents[2]
CASES = [
    *sorted((*test_capture_texts.CASES, *test_state_texts.CASES), key=lambda case: case[0].code),
    *test_plan_texts.CASES,
    *sorted(
        (*test_run_texts.CASES, *test_checkpoint_texts.CASES, *test_data_texts.CASES),
        key=lambda case: case[0].code,
    ),
    *test_ort_texts.CASES,
    *test_compile_texts.CASES,
]
ERRORS = list({type(error): error for error, _ in reversed(CASES)}.values())[::-1]
"""The first case of each class: some have several texts."""
CODES = list(errors.error_classes())


def test_every_class_has_a_text_of_its_own_tested() -> None:
    assert [type(error) for error in ERRORS] == list(errors.error_classes().values())


def test_codes_are_unique_and_every_class_is_a_direct_subclass() -> None:
    classes = errors.GraphAccelError.__subclasses__()
    assert len(CODES) == len(classes)
    assert all(not cls.__subclasses__() for cls in classes)


@pytest.mark.parametrize("error", ERRORS, ids=CODES)
def test_pickling_keeps_text_and_fields(error: errors.GraphAccelError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert dataclasses.asdict(copy) == dataclasses.asdict(error)


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page_with_the_same_parts(code: str) -> None:
    page = (ROOT / "docs" / "errors" / f"{code}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {code}: ")
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    assert parts[1::2] == ["What happened", "Example", "Fix"]
    assert all(len(part.strip()) > 30 for part in parts[2::2])
    assert "```" in parts[4]


def test_no_page_without_a_class() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "errors").iterdir()}
    assert sorted(pages - {"README"}) == CODES
    families = (ROOT / "docs" / "errors" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (GA\d)\.\. \|", families, re.M) == sorted({c[:3] for c in CODES})


def test_fields_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        errors.NoLoss("pipeline=2")  # type: ignore[misc]


def test_source_line_is_read_from_the_file(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("import torch\n\n\tx = y.item()\n")
    assert Location(str(source), 3).lines("here") == [
        f"  --> {source}:3",
        "    3 |     x = y.item()",
        "      |     ^^^^^^^^^^^^ here",
    ]


def test_location_without_source_shows_file_and_note() -> None:
    assert Location("gone.py", 3).lines("here") == ["  --> gone.py:3", "   here"]
    assert Location("gone.py", 3).lines("") == ["  --> gone.py:3"]


def test_columns_outside_of_the_text_underline_the_whole_line() -> None:
    *_, carets = Location("model.py", 3, "x = 1", 8, 12).lines("")
    assert carets == "      | ^^^^^"


def test_path_below_the_working_directory_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(Location(str(tmp_path / "src" / "model.py"), 4)) == "src/model.py:4"
    assert str(Location("/elsewhere/model.py", 4)) == "/elsewhere/model.py:4"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (102, "102 B"),
        (103, "0.1 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_importing_the_package_and_its_errors_does_not_import_torch() -> None:
    check = "import sys, graphaccel, graphaccel.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_unknown_public_name_is_an_attribute_error() -> None:
    import graphaccel

    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        _ = graphaccel.optimise  # type: ignore[attr-defined]
