"""Values on the command line: parsers of files, counts and sweep sizes, and an exit code."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphaccel.cli.pin_options import check_once, option_of, pin_grid, pins_of
from graphaccel.errors import error_classes
from graphaccel.planner.plan.option_values import positive

NOTHING_FITS = 3
"""Exit code of a command that found no plan."""
SWEEP_AXES = ("devices", "batch", "sequence")


def whole_number(text: str) -> int:
    """A whole number from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)


def machines(text: str) -> str:
    """A number of machines, or the least and the most."""
    ends = text.split(":")
    numbers = [int(end) if end.isascii() and end.isdigit() else 0 for end in ends]
    if len(ends) > 2 or min(numbers) < 1 or numbers[0] > numbers[-1]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor LEAST:MOST")
    return text


def sweep_sizes(text: str) -> tuple[str, tuple[Any, ...]]:
    """("devices", (8, 16)) of "devices=8,16"; ("pins", ({"zero": 0}, {"zero": 1})) of "zero=0,1",
    a combination of pins each."""
    axis, _, sizes = text.partition("=")
    if axis not in SWEEP_AXES:
        return "pins", pin_grid(text, SWEEP_AXES)
    if " " in sizes.strip():
        raise argparse.ArgumentTypeError(f"{axis} is swept alone; pin the rest:  --zero 1")
    listed = tuple(positive(size.strip()) for size in sizes.split(","))
    check_once(axis, listed)
    return axis, listed


def contradiction_of(axis: str, sizes: Sequence[Any], args: argparse.Namespace) -> str | None:
    """What to say of an option that fixes what a sweep varies; None where there is none."""
    fixed = [option_of(name) for name in pins_of(args) if axis == "pins" and name in sizes[0]]
    if axis in ("devices", "batch") and getattr(args, axis) is not None:
        fixed.append(f"--{axis}")
    return f"--sweep says {fixed[0].lstrip('-')}: leave {fixed[0]} out" if fixed else None


def price(text: str) -> float:
    """A number above 0."""
    try:
        result = float(text)
    except ValueError:
        result = 0.0
    if not 0 < result < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no price above 0")
    return result


def output_file(text: str) -> Path:
    """A writable file; checked before anything is searched or measured for it."""
    path = Path(text)
    reason = ""
    if path.is_dir():
        reason = "is a folder"
    elif not path.parent.is_dir():
        reason = f"can not be written: there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "can not be written"
    if reason:
        raise argparse.ArgumentTypeError(f"{text!r} {reason}")
    return path


def target(text: str) -> tuple[Path, str | None]:
    """("model.py", "make_job") of "model.py:make_job"; the function is None without a colon."""
    file, colon, function = text.rpartition(":")
    path, name = (Path(file), function) if colon and function.isidentifier() else (Path(text), None)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return path, name


def code_or_target(text: str) -> str | tuple[Path, str | None]:
    """An error code, or a file (and function) that returns a model."""
    return target(text) if ".py" in text else _code(text)


def _code(text: str) -> str:
    if (text.endswith(".json") and Path(text).is_file()) or text == "passes":
        return text
    if text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    if text.upper() not in error_classes():
        known = ", ".join(error_classes())
        raise argparse.ArgumentTypeError(f"there is no error {text!r}; there are {known}")
    return text.upper()
