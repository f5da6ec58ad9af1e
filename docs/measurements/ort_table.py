"""Write the table of ops in docs/onnxruntime.md for the installed build of ONNX Runtime.

    python docs/measurements/ort_table.py

Each build has a table of its own between two marks; a test fails while that of the installed build
is not what this writes. Install the other build and run it again for the other table.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from graphaccel.ir.text import target_text
from graphaccel.ort.kernels import Kernels, installed
from graphaccel.ort.ops.table import FAMILIES
from tests.ort.samples import CASES
from tests.ort.support import graph_of, narrow, why_not
from tests.support.ops.calls import Draw

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "onnxruntime.md"


def table(kernels: Kernels) -> str:
    """Markdown: by family the ops that run in float32 and float64, and those in float32 only."""
    rows = ["| family | float32 and float64 | float32 only | neither |", "|---|---|---|---|"]
    for family, ops in FAMILIES.items():
        found: dict[tuple[bool, bool], list[str]] = {}
        for op in ops:
            found.setdefault(_runs(op, kernels), []).append(f"`{target_text(op)}`")
        cells = [", ".join(sorted(found.get(key, []))) for key in ((True, True), (True, False))]
        cells.append(", ".join(sorted(found.get((False, False), []))))
        rows.append(f"| {family} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _runs(op: Any, kernels: Kernels) -> tuple[bool, bool]:
    """Whether some call of the op runs in float32, and whether some runs in float64."""
    found = {torch.float32: False, torch.float64: False}

    @seed(6)
    @settings(max_examples=12, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        args, kwargs = CASES[op](Draw(data))
        if all(found.values()):
            return
        for dtype, change in ((torch.float64, lambda v: v), (torch.float32, narrow)):
            module, _ = graph_of(op, change(args), change(kwargs))
            found[dtype] |= why_not(module, kernels) is None

    draw()
    return found[torch.float32], found[torch.float64]


def marks(build: str) -> tuple[str, str]:
    """The lines around a build's table."""
    return f"<!-- ops: {build} -->\n", f"<!-- end: {build} -->\n"


def with_table(page: str, kernels: Kernels) -> str:
    """The page with the table of a build. Raises ValueError without its marks."""
    first, last = marks(kernels.build)
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no lines {first!r} and {last!r}")
    return f"{before}{begin}\n{table(kernels)}\n{end}{after}"


def main() -> None:
    argparse.ArgumentParser(description="Update the table of ops.").parse_args()
    kernels = installed()
    if kernels is None:
        raise SystemExit("onnxruntime is not installed")
    PAGE.write_text(with_table(PAGE.read_text(), kernels))


if __name__ == "__main__":
    main()
