"""Placements and strategies as text: how a plan states them, and how they are read back.

    replicated                            every rank has the full tensor
    partial                               the tensors of all ranks sum up to it
    shard(1)                              dim 1 is sharded; shard(0, outer=3): in each of 3 sections
    shard(0, padding=1)                   the last rank has one position in excess
    shard(0, by='mlp.gate: topk', experts=8)    each rank has the positions of its own experts
    any                                   of an argument whose values the call does not read

A call states what it reads, what it returns, the rewrite it needs if any, and the second placement
in which a result is kept if any:

    shard(0), replicated -> shard(0), partial; lowered as softmax; keeps 1 replicated
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.shard import Placement, Row, Shard

_ANY = "any"
_VALUE = r"\d+|'[^']*'"
_SHARD = re.compile(rf"shard\((\d+)((?:, \w+=(?:{_VALUE}))*)\)")
_OPTION = re.compile(r", (\w+)=(?:(\d+)|'([^']*)')")
_ONE = rf"(?:{REPLICATED}|{PARTIAL}|{_ANY}|shard\(\d+(?:, \w+=(?:{_VALUE}))*\))"
_LIST = re.compile(rf"{_ONE}(?:, {_ONE})*")
_EACH = re.compile(_ONE)


def placement_text(place: Placement | None) -> str:
    """A placement as text; None stands for any."""
    if place is None:
        return _ANY
    if not isinstance(place, Shard):
        return place
    said = [str(place.dim)]
    said += [f"outer={place.outer}"] if place.outer > 1 else []
    said += [f"padding={place.padding}"] if place.padding else []
    said += [f"by={place.by!r}", f"experts={place.experts}"] if place.by else []
    return f"shard({', '.join(said)})"


def read_placement(text: str) -> Placement | None:
    """The placement that a text states. Raises ValueError for any other text."""
    if text in (REPLICATED, PARTIAL):
        return text
    if text == _ANY:
        return None
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no placement")
    options = {name: by if not number else int(number) for name, number, by in
               _OPTION.findall(match[2])}  # fmt: skip
    if unknown := sorted(set(options) - {"outer", "padding", "by", "experts"}):
        raise ValueError(f"{text!r}: a shard has no {unknown[0]}")
    return Shard(int(match[1]), **options)  # type: ignore[arg-type]


def call_text(row: Row, kept: Mapping[int, Placement]) -> str:
    """A call's strategy as text. kept: result → its second placement."""
    reads, gives = (", ".join(map(placement_text, own)) for own in (row.inputs, row.outputs))
    said = [f"{reads} -> {gives}" if reads else f"-> {gives}"]
    said += [f"lowered as {row.lowering}"] if row.lowering else []
    said += [f"keeps {k} {placement_text(place)}" for k, place in sorted(kept.items())]
    return "; ".join(said)


def read_call(text: str) -> tuple[Row, dict[int, Placement]]:
    """The strategy that a text states, and the second placements of results. Costs (`Row.gathered`,
    `Row.divided`) are not part of the text. Raises ValueError for any other text."""
    strategy, *rest = text.split("; ")
    reads, arrow, gives = strategy.partition("-> ")
    if not arrow:
        raise ValueError(f"{text!r} does not state what the call returns, after an arrow")
    lowering, kept = "", {}
    for part in rest:
        if part.startswith("lowered as "):
            lowering = part.removeprefix("lowered as ")
        elif match := re.fullmatch(r"keeps (\d+) (.+)", part):
            kept[int(match[1])] = _tensor(match[2])
        else:
            raise ValueError(f"{part!r} is neither a lowering nor a second placement")
    outputs = tuple(map(_tensor, _listed(gives)))
    return Row(tuple(map(read_placement, _listed(reads.rstrip()))), outputs, lowering), kept


def renamed(row: Row, name: Callable[[str], str]) -> Row:
    """A strategy with other names of the nodes that give the expert of every position."""

    def of(place: Placement | None) -> Placement | None:
        if not isinstance(place, Shard) or not place.by:
            return place
        return Shard(place.dim, place.outer, place.padding, name(place.by), place.experts)

    inputs, outputs = (tuple(map(of, own)) for own in (row.inputs, row.outputs))
    return Row(inputs, outputs, row.lowering, row.gathered, row.divided)  # type: ignore[arg-type]


def _listed(text: str) -> list[str]:
    """The placements of a list."""
    if not text:
        return []
    if _LIST.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no list of placements")
    return _EACH.findall(text)


def _tensor(text: str) -> Placement:
    place = read_placement(text)
    if place is None:
        raise ValueError("a result has one placement, not any")
    return place
