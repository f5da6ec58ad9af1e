"""`graphaccel explain passes`: prints the passes in the order in which they run."""

from __future__ import annotations

import textwrap

from graphaccel.passes.pipeline import PIPELINE


def passes_command() -> int:
    """Print the pipeline: number, name, level, whether values stay bitwise the same, and why there.

    What is printed are the entries of `passes.pipeline.PIPELINE`, which is what runs.
    """
    width = max(len(each.name) for each in PIPELINE)
    for number, each in enumerate(PIPELINE, 1):
        exact = "exact" if each.exact else ""
        print(f"{number:2}  {each.name:{width}}  {each.level:7}  {exact:5}".rstrip())
        print(textwrap.indent(textwrap.fill(each.why, 92, break_on_hyphens=False), " " * 6))
    return 0
