"""Write the tables of measurements in docs/ from benchmarks/results.

    python docs/measurements/measured.py

A table stands between two marks; tests/docs fails while it is not that of the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script

from benchmarks.tables.gpu import gpu_tables
from benchmarks.tables.gpu_proxy import proxy_table
from benchmarks.tables.models import compile_table, fusion_table, table
from benchmarks.tables.ort import kernel_table, ort_table
from benchmarks.tables.search import large_table, search_table
from benchmarks.tables.validation import predicted_table, unseen_table, validation_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: python docs/measurements/measured.py -->\n", "<!-- end -->\n"
ORT_PAGE = ROOT / "docs" / "onnxruntime.md"
FUSIONS_PAGE = ROOT / "docs" / "fusions.md"
COMPILE_PAGE = ROOT / "docs" / "compile.md"
ACCURACY_PAGE = ROOT / "docs" / "accuracy.md"


def with_table(page: str, folder: Path) -> str:
    """The page with the table of the results in `folder`. Raises ValueError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md has no lines {BEGIN!r} and {END!r}")
    results = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return f"{before}{begin}\n{table(results)}\n{end}{after}"


def with_ort_tables(page: str, folder: Path) -> str:
    """The page with both tables. Raises ValueError without their marks."""
    return _with(page, folder, {"ort": ort_table, "ort_kernels": kernel_table})


def with_validation(page: str, folder: Path) -> str:
    """The page with the tables of published runs, of deep models and of searches. Raises ValueError
    without their marks."""
    tables = {
        "validation": validation_table,
        "unseen": unseen_table,
        "large": large_table,
        "predicted": predicted_table,
        "search": search_table,
    }
    return _with(page, folder, tables)


def _with(page: str, folder: Path, tables: dict[str, Callable[[dict[str, Any]], str]]) -> str:
    for name, write in tables.items():
        first, last = f"<!-- measured: {name} -->\n", f"<!-- end: {name} -->\n"
        before, begin, rest = page.partition(first)
        _, end, after = rest.partition(last)
        if not begin or not end:
            raise ValueError(f"the page has no lines {first!r} and {last!r}")
        result = json.loads((folder / f"{name}.json").read_text())
        page = f"{before}{begin}\n{write(result)}\n{end}{after}"
    return page


def with_fusion_table(page: str, folder: Path) -> str:
    """The page with its table. Raises ValueError without the marks."""
    first, last = "<!-- measured: fusions -->\n", "<!-- end: fusions -->\n"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no lines {first!r} and {last!r}")
    result = json.loads((folder / "fusions.json").read_text())
    return f"{before}{begin}\n{fusion_table(result)}\n{end}{after}"


def with_compile_table(page: str, folder: Path) -> str:
    """The page with its table. Raises ValueError without the marks."""
    return _with(page, folder, {"compile": compile_table})


GPU_FIRST, GPU_LAST = "<!-- measured: gpu -->\n", "<!-- end: gpu -->\n"


def with_gpu_tables(page: str, folder: Path) -> str:
    """The page with what was measured on a GPU. Raises ValueError without the marks."""
    before, begin, rest = page.partition(GPU_FIRST)
    _, end, after = rest.partition(GPU_LAST)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md has no lines {GPU_FIRST!r} and {GPU_LAST!r}")
    file = folder / "gpu.json"
    result = json.loads(file.read_text()) if file.exists() else None
    return f"{before}{begin}\n{gpu_tables(result)}\n{end}{after}"


def with_proxy_table(page: str, folder: Path) -> str:
    """The page with what was counted without a GPU. Raises ValueError without the marks."""
    return _with(page, folder, {"gpu_proxy": proxy_table})


def main() -> None:
    argparse.ArgumentParser(description="Update the tables of measurements.").parse_args()
    page = with_proxy_table(with_table(PAGE.read_text(), RESULTS), RESULTS)
    PAGE.write_text(with_gpu_tables(page, RESULTS))
    ORT_PAGE.write_text(with_ort_tables(ORT_PAGE.read_text(), RESULTS))
    FUSIONS_PAGE.write_text(with_fusion_table(FUSIONS_PAGE.read_text(), RESULTS))
    COMPILE_PAGE.write_text(with_compile_table(COMPILE_PAGE.read_text(), RESULTS))
    ACCURACY_PAGE.write_text(with_validation(ACCURACY_PAGE.read_text(), RESULTS))


if __name__ == "__main__":
    main()
