"""The placements of a step's tensors on one mesh axis, by block kind, as a plan holds them.

Blocks whose parameters and calls have the same placements are stated together, so that a model of a
hundred equal layers takes a page. `few_layers` and `all_layers` convert between the step of a model
and that of few of its layers (`ir.replication`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.replication.layers import NotRepeated, Run, among, copies
from graphaccel.sharding.placement_names import PARAMETERS, Name

Texts: TypeAlias = tuple[tuple[str, str], ...]
_SECTIONS = (PARAMETERS, "forward", "backward")
_RANGE = re.compile(r"(|.*\.)(\d+)-(\d+)")


@dataclass(frozen=True)
class BlockPlacements:
    """The placements of some blocks.

    blocks: their names, consecutive ones as a range ("blocks.0-11"); "" for what is in no block.
    parameters: name in the block → its placement; buffers too. forward, backward: call → its
    strategy (`sharding.placement_text`). All sorted.
    """

    blocks: tuple[str, ...]
    parameters: Texts = ()
    forward: Texts = ()
    backward: Texts = ()

    @property
    def names(self) -> list[str]:
        """The names of the blocks, one by one."""
        return [name for text in self.blocks for name in _expanded(text)]


AxisPlacements: TypeAlias = tuple[BlockPlacements, ...]


def grouped(texts: Mapping[Name, str]) -> AxisPlacements:
    """Placements by name → by block kind, in the order in which blocks first occur."""
    blocks: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name, text in texts.items():
        own = blocks.setdefault(name.block, {section: [] for section in _SECTIONS})
        own[name.section].append((name.label, text))
    return _merged(
        (block, BlockPlacements((), *(tuple(sorted(own[section])) for section in _SECTIONS)))
        for block, own in blocks.items()
    )


def by_name(placements: AxisPlacements) -> dict[Name, str]:
    """Placements by block kind → by name. Raises ValueError for a block that is stated twice."""
    results: dict[Name, str] = {}
    for own in placements:
        sections = {section: getattr(own, section) for section in _SECTIONS}
        for block in own.names:
            for section, texts in sections.items():
                for label, text in texts:
                    name = Name(block, section, label)
                    if name in results:
                        raise ValueError(f"{name} is stated twice")
                    results[name] = text
    return results


def all_layers(
    placements: AxisPlacements, runs: Sequence[Run], counts: Sequence[int]
) -> AxisPlacements:
    """Placements of a step with `counts` layers of each run → of the step with all of them. Raises
    NotRepeated for runs inside of blocks."""
    _check_outermost(runs)
    return _merged(
        (name, own)
        for own in placements
        for block in own.names
        for name in copies(runs, block, counts)
    )


def few_layers(
    placements: AxisPlacements, runs: Sequence[Run], counts: Sequence[int]
) -> AxisPlacements:
    """Placements of a step with all layers → of the step with `counts` layers of each run. Raises
    NotRepeated where layers that one layer stands for have different placements, and for runs
    inside of blocks."""
    _check_outermost(runs)
    results: dict[str, BlockPlacements] = {}
    for own in placements:
        less = replace(own, blocks=())
        for block in own.names:
            name = _fewer(runs, block, counts)
            if results.setdefault(name, less) is not less:
                raise NotRepeated(f"{block} is placed differently from other copies of {name}")
    return _merged(results.items())


def to_data(placements: AxisPlacements) -> list[dict[str, Any]]:
    """As plain data, for JSON."""
    return [
        {"blocks": list(own.blocks), **{s: dict(getattr(own, s)) for s in _SECTIONS}}
        for own in placements
    ]


def from_data(data: Iterable[Mapping[str, Any]]) -> AxisPlacements:
    """From plain data. Raises ValueError for unknown fields."""
    results = []
    for own in data:
        if unknown := sorted(set(own) - {"blocks", *_SECTIONS}):
            raise ValueError(f"unknown fields in axis_placements: {', '.join(unknown)}")
        sections = (tuple(sorted(own.get(section, {}).items())) for section in _SECTIONS)
        results.append(BlockPlacements(tuple(own["blocks"]), *sections))
    return tuple(results)


def _merged(blocks: Iterable[tuple[str, BlockPlacements]]) -> AxisPlacements:
    """Blocks with the same placements as one, in the order in which their kinds first occur."""
    groups: dict[BlockPlacements, list[str]] = defaultdict(list)
    for name, own in blocks:
        groups[replace(own, blocks=())].append(name)
    return tuple(replace(own, blocks=_ranges(names)) for own, names in groups.items())


def _fewer(runs: Sequence[Run], name: str, counts: Sequence[int]) -> str:
    """The name, with `counts` layers of each run, of the layer that stands for the block `name`:
    the inverse of `ir.replication.layers.copies`."""
    for run, few in zip(runs, among(runs, counts), strict=True):
        number = run.number(name)
        if number is not None and 0 <= number < run.count:
            more = run.count - few.count
            return few.layer(number if number == 0 else max(1, number - more))
    return _renumbered(runs, name, counts)


def _renumbered(runs: Sequence[Run], name: str, counts: Sequence[int]) -> str:
    """The name of a block that is in no run, behind runs of its container that got shorter."""
    for run, few in zip(reversed(runs), reversed(among(runs, counts)), strict=True):
        number = run.number(name)
        if number is not None and number >= run.count:
            return few.layer(number - run.count + few.count)
    return name


def _check_outermost(runs: Sequence[Run]) -> None:
    if any(block_of(run.path) for run in runs):
        raise NotRepeated("layers repeat inside of numbered blocks")


def _ranges(names: Sequence[str]) -> tuple[str, ...]:
    """Names of blocks, consecutive ones as a range: blocks.0, blocks.1, blocks.2 → blocks.0-2."""
    results: list[tuple[str, int, int]] = []
    for name in names:
        path, _, number = name.rpartition(".")
        if not number.isdigit():
            results.append((name, -1, -1))
        elif results and results[-1][0] == path and results[-1][2] == int(number) - 1:
            results[-1] = path, results[-1][1], int(number)
        else:
            results.append((path, int(number), int(number)))
    return tuple(map(_range, results))


def _range(part: tuple[str, int, int]) -> str:
    path, first, last = part
    if first < 0:
        return path
    numbers = str(first) if first == last else f"{first}-{last}"
    return f"{path}.{numbers}" if path else numbers


def _expanded(text: str) -> list[str]:
    """The names of a range of blocks."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    return [f"{match[1]}{number}" for number in range(int(match[2]), int(match[3]) + 1)]
