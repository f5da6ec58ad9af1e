"""Find repeated blocks: the identical layers of a model, by hashing their subgraphs.

A block is what one numbered entry of a container computes (`transformer.h.3`); blocks whose nodes
are the same except for the parameters they read have the same kind.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphaccel.ir.text import target_text


@dataclass(frozen=True)
class Block:
    """name: module path of the numbered entry. kind: equal for identical blocks. nodes: their
    number in the joint graph."""

    name: str
    kind: str
    nodes: int


def block_of(module: str) -> str:
    """The block that a module path belongs to: up to its first numbered component, "" if it has
    none."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def find_blocks(graph: fx.GraphModule) -> tuple[Block, ...]:
    """The blocks of a joint graph in the order they first compute something."""
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        name = block_of(node.meta.get("module", ""))
        if name:
            members[name].append(node)
    said: dict[Any, str] = {}
    return tuple(Block(name, _digest(nodes, said), len(nodes)) for name, nodes in members.items())


def _digest(nodes: list[fx.Node], said: dict[Any, str]) -> str:
    """A hash of ops, sizes and edges inside the block; inputs from outside count by type only.
    said: ops and sizes as text."""

    def text_of(value: Any) -> str:
        if value not in said:
            said[value] = str(value)
        return said[value]

    number = {node: i for i, node in enumerate(nodes)}
    text = []
    for node in nodes:
        inputs = [
            str(number[n]) if n in number else f"out:{text_of(n.meta.get('dims'))}"
            for n in node.all_input_nodes
        ]
        dims = text_of(node.meta.get("dims"))
        text.append(f"{target_text(node.target)} {dims} {' '.join(inputs)}")
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]
