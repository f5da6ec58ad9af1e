"""Settings of which a run takes one: what is typed goes before what stands in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from graphaccel.progress import progress

_ONE_OF = (
    ("steps", "epochs"),
    ("warmup_steps", "warmup_fraction"),
    ("micro_batch", "microbatches"),
)
"""The last of them is a pin."""


def drop_replaced(
    said: dict[str, Any], pins: dict[str, Any], typed: argparse.Namespace, file: Path
) -> None:
    """Remove what the file says of a setting or pin whose other form is typed, and say so.

    said, pins: those of the file. typed: the command line; what was not typed is missing, or None.
    """
    for pair in _ONE_OF:
        for name, other in (pair, pair[::-1]):
            given = getattr(typed, name, None) is not None
            if not given or getattr(typed, other, None) is not None:
                continue
            for of_file in (said, pins):
                if of_file.pop(other, None) is not None:
                    option = f"--{name.replace('_', '-')}"
                    progress("settings", f"{option}, not `{other}` of {file}", 0.0)
