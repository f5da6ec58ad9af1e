"""Runs passes and does their chores: time, op-count difference, numbered dumps.

`GRAPHACCEL_DUMP=dir` writes the graph after each pass that changed it, `dir/PLAN/04_recompute.txt`,
and the graphs of every stage, which are what runs. Each plan that is built has a folder: the search
may build some that then do not fit, and an evaluation is a plan of its own. Only rank 0 writes; all
ranks build the same.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.text import graph_text, target_text
from graphaccel.ir.unfold import distinct_nodes
from graphaccel.planner.plan import Plan

T = TypeVar("T")
log = logging.getLogger("graphaccel.passes")


class Runner:
    """One run of the pipeline for one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._number = 0
        wanted = os.environ.get("GRAPHACCEL_DUMP") if os.environ.get("RANK", "0") == "0" else None
        self._dump = Path(wanted) / re.sub(r"\W+", "-", plan.name) if wanted else None

    def step(
        self, name: str, run: Callable[[StepGraph, Plan], StepGraph], step: StepGraph
    ) -> StepGraph:
        """A pass from step to step: one that rewrites the forward and differentiates again."""
        result = self.call(name, lambda: run(step, self._plan))
        if result is not step:
            self._report(name, step.graph, result.graph)
        return result

    def graph(
        self, name: str, run: Callable[[fx.GraphModule], fx.GraphModule], graph: fx.GraphModule
    ) -> fx.GraphModule:
        """A pass over the joint graph, in place."""
        before = _count(graph)
        result = self.call(name, lambda: run(graph))
        if _count(result) != before:
            self._write(name, result, _difference(before, _count(result)))
        return result

    def call(self, name: str, run: Callable[[], T]) -> T:
        """Any pass, timed."""
        start = time.perf_counter()
        result = run()
        self._number += 1
        log.info("%02d %-24s %6.1f ms", self._number, name, 1e3 * (time.perf_counter() - start))
        return result

    def dump(self, name: str, graph: fx.GraphModule, notes: str = "") -> None:
        """Write a graph to the plan's folder, if GRAPHACCEL_DUMP asks for it."""
        if self._dump is not None:
            self._dump.mkdir(parents=True, exist_ok=True)
            head = f"# {notes}\n" if notes else ""
            (self._dump / f"{name}.txt").write_text(head + graph_text(graph.graph, notes=True))

    def write(self, name: str, content: bytes) -> None:
        """Write a file to the plan's folder, if GRAPHACCEL_DUMP asks for it."""
        if self._dump is not None:
            self._dump.mkdir(parents=True, exist_ok=True)
            (self._dump / name).write_bytes(content)

    def _report(self, name: str, before: fx.GraphModule, after: fx.GraphModule) -> None:
        self._write(name, after, _difference(_count(before), _count(after)))

    def _write(self, name: str, graph: fx.GraphModule, difference: str) -> None:
        log.debug("%s: %s", name, difference)
        self.dump(f"{self._number:02d}_{name}", graph, difference)


def _count(graph: fx.GraphModule) -> Counter[str]:
    found: Counter[str] = Counter()
    for node, count in distinct_nodes(graph):
        if node.op == "call_function":
            found[target_text(node.target)] += count
    return found


def _difference(before: Counter[str], after: Counter[str]) -> str:
    """`mm: 12 -> 8 (-4), add.Tensor: 3 -> 5 (+2)`"""
    names = sorted(set(before) | set(after))
    changed = [n for n in names if before[n] != after[n]]
    return ", ".join(f"{n}: {before[n]} -> {after[n]} ({after[n] - before[n]:+d})" for n in changed)
