"""Prints progress lines of planning and compiling."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("graphaccel.planner")


def progress(phase: str, what: str, seconds: float) -> None:
    """Print `graphaccel: capture    4,812 ops   9.8 s` to stderr of rank 0.

    Without such lines a long compile looks like a hang.
    """
    log.info("%s: %s in %.2f s", phase, what, seconds)
    if os.environ.get("RANK", "0") == "0" and os.environ.get("GRAPHACCEL_QUIET") != "1":
        print(f"graphaccel: {phase:<10} {what:<60} {seconds:6.1f} s", file=sys.stderr)
