"""Chooses which regions of a graph run in ONNX Runtime.

"all": everything that can, a region for each block of the model (`transformer.h.3`), so that
identical layers share one model and the memory of a layer is freed before the next one runs. Module
paths: the same inside these modules. "auto": from whole blocks down to single modules, the largest
regions that were measured to be faster than torch on this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ort.kernels import Kernels
from graphaccel.ort.partition import Border, Flow, Part, partition, touches, written
from graphaccel.ort.translate import RegionModel, refusal, translate
from graphaccel.planner.profile.cost import is_view

LEVELS = 5
"""How many levels below a block "auto" searches: `h.3`, `h.3.attn`, `h.3.attn.proj`, ..."""


class Chooser:
    """Chooses regions of one graph. refused: nodes that cannot be in a region, with reasons."""

    def __init__(self, graph: fx.Graph, kernels: Kernels) -> None:
        self._kernels = kernels
        self.flow = Flow(graph, lambda n: is_view(n) and refusal(n, kernels) is None)
        self.refused: dict[fx.Node, str] = {}
        changed = written(graph)
        for node in self.flow.computing:
            reason = refusal(node, kernels)
            if reason is None and touches(node, changed):
                reason = "its memory is written into by another op"
            if reason is not None:
                self.refused[node] = reason

    def asked(self, node: fx.Node, mode: str | tuple[str, ...]) -> bool:
        """Whether the mode asks for a node to be in a region, if it can be."""
        return _label(node, mode) is not None

    def parts(self, mode: str | tuple[str, ...], wins: Collection[str]) -> list[Part]:
        """Regions and single nodes, in an order in which they can run. wins: faster regions, for
        "auto"."""
        if mode == "auto":
            return self._winning(wins)
        return partition(self.flow, lambda n: None if n in self.refused else _label(n, mode))

    def candidates(self) -> Iterator[tuple[Part, RegionModel, Border]]:
        """Every region that "auto" considers, with its model and border; to be measured."""
        for level in range(LEVELS):
            parts = self._level(level, {})
            wanted = self.flow.wanted(parts)
            for part, model in self._models(parts):
                yield part, model, self.flow.border(part, wanted)

    def _winning(self, wins: Collection[str]) -> list[Part]:
        taken: dict[fx.Node, str] = {}
        for level in range(LEVELS) if wins else ():
            for part, model in self._models(self._level(level, taken)):
                if model.key in wins:
                    taken |= {n: f"{level} {part.label}" for n in part.nodes if n not in taken}
        while True:
            # Beside other regions a region may be split; what is left must be faster as well.
            parts = partition(self.flow, taken.get)
            lost = [p for p, model in self._models(parts) if model.key not in wins]
            if not lost:
                return parts
            for part in lost:
                for node in part.nodes:
                    taken.pop(node, None)

    def _level(self, level: int, taken: dict[fx.Node, str]) -> list[Part]:
        def label(node: fx.Node) -> str | None:
            return None if node in self.refused or node in taken else _module(node, level)

        return partition(self.flow, label)

    def _models(self, parts: list[Part]) -> Iterator[tuple[Part, RegionModel]]:
        wanted = self.flow.wanted(parts)
        for part in parts:
            if part.label is not None:
                nodes, inputs, outputs = self.flow.border(part, wanted)
                values = {n: n.meta["val"] for n in inputs}
                yield part, translate(nodes, values, outputs, self._kernels)


def _label(node: fx.Node, mode: str | tuple[str, ...]) -> str | None:
    module = node.meta.get("module", "")
    block = block_of(module)
    if mode in ("all", "auto"):
        return block
    for path in mode:
        if module == path or module.startswith(f"{path}."):
            return f"{path} {block}"
    return None


def _module(node: fx.Node, level: int) -> str:
    """The module path up to `level` components below the block."""
    module = node.meta.get("module", "")
    block = block_of(module)
    depth = (block.count(".") + 1 if block else 0) + level
    return ".".join(module.split(".")[:depth])
