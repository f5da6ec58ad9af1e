"""Proves a model of many identical layers by a few of them, where all of it does not fit.

The model with `FEW` layers of each run, and everything outside of the runs, is compared with eager
code. `first_difference` then checks that every further layer of the captured graph is a copy of a
layer that was compared: same calls, and each argument from the same place in the layer, in its
neighbour or outside. That eager code repeats its layers is proved by the capture
(`capture.layers.runs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphaccel.capture.layers.replicate import layered
from graphaccel.capture.layers.runs import shortened
from graphaccel.capture.stepgraph import StepGraph, of_layers
from graphaccel.ir.replication.layers import Item, NotRepeated, Run, among, head, items_of
from graphaccel.proof.comparison import Pair
from graphaccel.proof.eager_step import Subject
from graphaccel.runtime.module import own_forward

FEW = 4
"""Layers of each run that are compared: the first, two in the middle, the last. Two show what a
layer reads of its neighbours, as opposed to what all layers read."""

_Key = tuple[int, int, int]
"""(run, -1 outside of the middle layers; copy, from 1; number in the copy)."""


@dataclass(frozen=True)
class Copied:
    """A captured graph whose layer is not a copy of one that was compared. node: the first that
    differs, None where it is a result."""

    text: str
    node: fx.Node | None


def few_layers(pair: Pair) -> Pair:
    """The pair of the same model with `FEW` layers of each run, on the same weights.

    Raises NotRepeated where the capture does not know identical layers.
    """
    step, model = pair.step, pair.subject.model
    if step.repeats is None:
        raise NotRepeated("its graph was not captured from few of many identical layers")
    runs = step.repeats.runs
    few = of_layers(step, (FEW,) * len(runs))
    short = shortened(model, dict.fromkeys(runs, FEW))
    known = {id(p) for p in short.parameters()}
    others = (p for p in model.parameters() if id(p) not in known)
    held = sum(p.numel() * p.element_size() for p in others)
    subject = Subject(short, own_forward(short), pair.subject.loss_fn)
    return replace(pair, subject=subject, step=few, of=step, held=held)


def layers(step: StepGraph) -> str:
    """How many identical layers a step has, by kind."""
    assert step.repeats is not None
    return " + ".join(str(run.count) for run in step.repeats.runs)


def first_difference(step: StepGraph) -> Copied | None:
    """The first node of a captured graph that is no copy of its counterpart in a graph with `FEW`
    layers of each run; None where all are. Raises NotRepeated."""
    assert step.repeats is not None
    runs = step.repeats.runs
    few = of_layers(step, (FEW,) * len(runs))
    known = _Graph(few, among(runs, (FEW,) * len(runs)))
    ours = _Graph(step, runs)
    if known.sizes(2) != ours.sizes(2):
        return Copied("its layers have another number of nodes than those compared", None)
    return next((d for key in ours.items if (d := _different(ours, known, key))), None)


class _Graph:
    """The nodes of a captured graph by layer."""

    def __init__(self, step: StepGraph, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self.last = [run.count - 2 for run in runs]
        result = items_of(layered(step.graph, step.inputs, step.outputs), runs, self.last)
        counts: Counter[tuple[int, int]] = Counter()
        self.items: dict[_Key, Item] = {}
        self.keys: dict[fx.Node | None, _Key] = {}
        for item in result:
            group = (item.middle, item.copy if item.middle >= 0 else 0)
            key = (*group, counts[group])
            counts[group] += 1
            self.items[key] = item
            self.keys[item.node] = key
        self._counts = counts
        specs = zip((i for i in result if i.section == "input"), step.inputs, strict=True)
        constants = step.forward.constants
        self.constants = {
            self.keys[item.node]: constants[spec.name]
            for item, spec in specs
            if spec.kind == "constant"
        }

    def sizes(self, copies: int) -> dict[tuple[int, int], set[int]]:
        """(run, copy) → number of nodes; copies from `copies` on count as one."""
        results: dict[tuple[int, int], set[int]] = {}
        for (run, copy), count in self._counts.items():
            results.setdefault((run, min(copy, copies)), set()).add(count)
        return results

    def target(self, key: _Key, slot: int) -> _Key:
        """What an argument is."""
        return self.keys[self.items[key].refs[slot]]

    def place(self, key: _Key) -> Any:
        """The name of a placeholder or result, relative to its layer."""
        item = self.items[key]
        for at, run in enumerate(self.runs):
            number = run.number(item.path)
            if number is None or number < 0:
                continue
            behind = number - run.count
            where = number - key[1] if at == key[0] else number if number == 0 else behind
            return at, where, run.around(item.path)[1]
        return head(item.path)


def _different(ours: _Graph, known: _Graph, key: _Key) -> Copied | None:
    """How a node differs from its counterpart."""
    run, copy, number = key
    like = (run, min(copy, 2), number)
    mine, theirs = ours.items[key], known.items[like]
    same = mine.written == theirs.written and mine.kind == theirs.kind
    same = same and mine.section == theirs.section and _called(mine) == _called(theirs)
    if same and mine.section in ("input", "result"):
        same = ours.place(key) == known.place(like)
    if same and key in ours.constants:
        same = torch.equal(ours.constants[key], known.constants[like])
    for slot in range(len(mine.refs) if same else 0):
        same = same and ours.target(key, slot) == _expected(ours, known, key, slot)
    if same:
        return None
    name = f"`{mine.path}`" if mine.node is None else f"`{mine.node.name}` in `{mine.path}`"
    return Copied(f"{name} is not what the layers that were compared have in its place", mine.node)


def _called(item: Item) -> Any:
    """The op, and the sizes in it that depend on the batch."""
    return item.node and (item.node.op, _op(item.node), item.node.meta.get("sizes"))


def _op(node: fx.Node) -> Any:
    return node.target if node.op == "call_function" else None


def _expected(ours: _Graph, known: _Graph, key: _Key, slot: int) -> _Key | None:
    """What an argument must be, by what it is in the two middle layers that were compared."""
    run, copy, number = key

    def moved(result: _Key) -> _Key:
        """The same value of another run, or of none: its first or last copy."""
        return (result[0], ours.last[result[0]], result[2]) if result[1] == 2 else result

    if run < 0:
        return moved(known.target(key, slot))
    first, second = known.target((run, 1, number), slot), known.target((run, 2, number), slot)
    if first == (run, 1, first[2]) and second == (run, 2, first[2]):
        return (run, copy, first[2])
    if first[0] < 0 and second[:2] == (run, 1):
        return first if copy == 1 else (run, copy - 1, second[2])
    if first[:2] == (run, 2) and second[0] < 0:
        return second if copy == ours.last[run] else (run, copy + 1, first[2])
    return moved(first) if first == second and first[0] != run else None
