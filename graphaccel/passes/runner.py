"""Run a list of passes; time, verify, diff and dump each of them.

After each pass: a line in the log with its time, and with the new number of calls of each op where
it changed; a check that every program still has the inputs and results that it states
(`passes.verify`), and with `GRAPHACCEL_VERIFY=1` a full check of every graph.

`GRAPHACCEL_DUMP=dir` writes the graphs after each pass that changed them, numbered in the order of
the run, `dir/PLAN/08_recompute.txt`, and the graphs of every stage, which are what runs. Each plan
that is built has a folder: the search may build some that then do not fit, and an evaluation is a
plan of its own. Only rank 0 writes; all ranks build the same graphs.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from torch import fx

from graphaccel.compat.torch.graphs import is_deferred
from graphaccel.ir.replication.unfold import distinct_nodes
from graphaccel.ir.text import graph_text, target_text
from graphaccel.passes.context import Context
from graphaccel.passes.verify import InvalidGraph, check_counts, check_graphs
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name

T = TypeVar("T")
Level: TypeAlias = Literal["step", "rank", "joint", "program", "sums"]
log = logging.getLogger("graphaccel.passes")


@dataclass(frozen=True)
class Pass:
    """One entry of the pipeline.

    name: of its file and function. run: the adapter that applies it. level: what it rewrites: the
    captured "step", the graph of one "rank", its "joint" graph of forward and backward before it is
    cut into stages, the "program" of each stage, or the "sums" of gradients in it. why: the reason
    for its place. exact: whether values stay bitwise identical.
    """

    name: str
    level: Level
    run: Callable[[Context], Context]
    why: str
    exact: bool = False


class Runner:
    """One run of a list of passes for one plan."""

    def __init__(self, plan: Plan, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)
        self._number = 0
        wanted = os.environ.get("GRAPHACCEL_DUMP") if os.environ.get("RANK", "0") == "0" else None
        self._dump = Path(wanted) / re.sub(r"\W+", "-", plan_name(plan)) if wanted else None
        self._full = os.environ.get("GRAPHACCEL_VERIFY", "0") not in ("", "0")

    def run(self, context: Context, *levels: Level) -> Context:
        """Run the passes of these levels in their order.

        Raises what passes raise, and InvalidGraph for a pass that left an invalid graph.
        """
        for each in self.passes:
            if each.level in levels:
                context = self._one(each, context)
        return context

    def timed(self, name: str, run: Callable[[], T]) -> T:
        """Run anything else, timed and numbered like a pass."""
        start = time.perf_counter()
        result = run()
        self._number += 1
        log.info("%02d %-24s %6.1f ms", self._number, name, 1e3 * (time.perf_counter() - start))
        return result

    def _one(self, each: Pass, context: Context) -> Context:
        watched = self._dump is not None or log.isEnabledFor(logging.DEBUG)
        before = _texts(context) if watched else {}
        counted = _count(context) if watched else Counter()
        result = self.timed(each.name, lambda: each.run(context))
        try:
            check_counts(result)
            if self._full:
                check_graphs(result)
        except InvalidGraph as error:
            raise InvalidGraph(f"after {each.name}: {error}") from error
        if watched and _texts(result) != before:
            self._report(each.name, result, _difference(counted, _count(result)))
        return result

    def _report(self, name: str, context: Context, difference: str) -> None:
        log.debug("%s: %s", name, difference)
        if self._dump is not None:
            graphs = [f"# {what}\n{text}" for what, text in _texts(context).items()]
            head = f"# {difference}\n" if difference else ""
            self.write(f"{self._number:02d}_{name}.txt", (head + "\n".join(graphs)).encode())

    def dump(self, name: str, graph: fx.GraphModule) -> None:
        """Write a graph to the plan's folder, if GRAPHACCEL_DUMP asks for it."""
        if self._dump is not None:
            self.write(f"{name}.txt", graph_text(graph.graph, notes=True).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file to the plan's folder, if GRAPHACCEL_DUMP asks for it."""
        if self._dump is not None:
            self._dump.mkdir(parents=True, exist_ok=True)
            (self._dump / name).write_bytes(content)


def _texts(context: Context) -> Mapping[str, str]:
    """The graphs as text; graphs that are not built yet are left out."""
    graphs = context.graphs.items()
    return {
        name: graph_text(graph.graph, notes=True)
        for name, graph in graphs
        if not is_deferred(graph)
    }


def _count(context: Context) -> Counter[str]:
    """How many calls each op has."""
    results: Counter[str] = Counter()
    for graph in context.graphs.values():
        for node, count in distinct_nodes(graph):
            if node.op == "call_function":
                results[target_text(node.target)] += count
    return results


def _difference(before: Counter[str], after: Counter[str]) -> str:
    """`mm: 12 -> 8 (-4), add.Tensor: 3 -> 5 (+2)`"""
    names = sorted(set(before) | set(after))
    changed = [n for n in names if before[n] != after[n]]
    return ", ".join(f"{n}: {before[n]} -> {after[n]} ({after[n] - before[n]:+d})" for n in changed)
