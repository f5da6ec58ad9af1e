"""The lines that tell how far planning and compiling are."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("graphaccel.planner")


def progress(phase: str, what: str, seconds: float) -> None:
    """`graphaccel: capture    4,812 ops   9.8 s` on stderr of rank 0: silence is read as a hang."""
    log.info("%s: %s in %.2f s", phase, what, seconds)
    if os.environ.get("RANK", "0") == "0" and os.environ.get("GRAPHACCEL_QUIET") != "1":
        print(f"graphaccel: {phase:<10} {what:<60} {seconds:6.1f} s", file=sys.stderr)
