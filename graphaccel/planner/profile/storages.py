"""The storages of a step's tensors as columns; views share the storage of their base."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.ir.calls import is_random
from graphaccel.planner.profile.axis_collectives import is_kept
from graphaccel.planner.profile.cost import is_view
from graphaccel.planner.profile.lines import Lines

_HELD = ("parameter", "buffer", "tangent")  # inputs that belong to one stage
_FAR = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Tensor:
    """One result of a node that was read. item: which one of several, -1 where there is one."""

    node: fx.Node
    item: int

    @property
    def value(self) -> torch.Tensor:
        """The (fake) tensor itself."""
        result = self.node.meta["val"]
        return result[self.item] if self.item >= 0 else result


@dataclass(frozen=True, eq=False)
class Storages:
    """The storage of each tensor as columns; a view shares the storage of its base.

    tensor: which of `Profile.tensors` it is, or is a copy of. row: joint row that computes it. at:
    position. ahead: computed in the forward. value: computed by a call; input: number of the
    placeholder otherwise, -1.
    common: computed from batch and constants only, without random numbers, so that every stage that
      needs it computes it itself. kept: random or communicated, which is not repeated where a block
      is recomputed. released: a cast of a parameter, which is repeated for the backward. gradient:
      of a parameter, returned. replicated: all ranks of the tensor axis hold it. item_bytes: of one
      element.
    uses: (storage, joint row, position, whether it is in the forward), by storage, then by row;
      uses of a view are uses of its base.
    """

    tensor: np.ndarray
    row: np.ndarray
    at: np.ndarray
    ahead: np.ndarray
    value: np.ndarray
    input: np.ndarray
    common: np.ndarray
    kept: np.ndarray
    released: np.ndarray
    floating: np.ndarray
    gradient: np.ndarray
    replicated: np.ndarray
    item_bytes: np.ndarray
    uses: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def used(self) -> tuple[np.ndarray, np.ndarray]:
        """(storages that have uses, where the uses of each start)."""
        return np.unique(self.uses[0], return_index=True)

    @cached_property
    def owned(self) -> np.ndarray:
        """Storages computed in the forward by one stage only."""
        return self.value & self.ahead & ~self.common

    @cached_property
    def waits(self) -> np.ndarray:
        """Those of them that are saved if the backward reads them."""
        return self.owned & ~self.released

    @cached_property
    def last_forward(self) -> np.ndarray:
        """Joint row of the last use in the forward, -1 without one."""
        return self._last(self.uses[3])

    @cached_property
    def last_backward(self) -> np.ndarray:
        """Joint row of the last use in the backward, -1 without one."""
        return self._last(~self.uses[3])

    @cached_property
    def first_wanted(self) -> np.ndarray:
        """The earliest position whose backward reads it, `_FAR` without one."""
        result = np.full(len(self), _FAR)
        storage, _, place, ahead = self.uses
        np.minimum.at(result, storage[~ahead], place[~ahead])
        return result

    @cached_property
    def saved(self) -> np.ndarray:
        """Storages computed in the forward and saved for the backward; common ones are recomputed
        there instead."""
        return self.waits & (self.last_backward >= 0)

    def _last(self, chosen: np.ndarray) -> np.ndarray:
        result = np.full(len(self), -1)
        np.maximum.at(result, self.uses[0][chosen], self.uses[1][chosen])
        return result


@dataclass(frozen=True, eq=False)
class Crossing:
    """Values that may cross a cut. storage, at, last: its number, position, and position of its
    last use in the forward. uses: (which of them, position) of each such use."""

    storage: np.ndarray
    at: np.ndarray
    last: np.ndarray
    uses: tuple[np.ndarray, np.ndarray]


def find_storages(
    step: StepGraph,
    lines: Lines,
    position: np.ndarray,
    forward: np.ndarray,
    released: np.ndarray,
) -> tuple[tuple[Tensor, ...], Storages]:
    """One storage per tensor that is computed, and the results of the nodes that were read.

    lines: of the step's joint graph. position, forward, released: of each of its rows, its
    position, whether it is in the forward, and whether it is repeated for the backward.
    """
    views = [is_view(n) for n in lines.nodes]
    built = [[] if view else _tensors(n) for n, view in zip(lines.nodes, views, strict=True)]
    tensors = tuple(tensor for own in built for tensor in own)
    many = lines.by_row([len(own) for own in built])
    begin = np.cumsum(many) - many  # a row's first storage
    row = np.repeat(np.arange(len(many)), many)
    part = np.arange(len(row)) - begin[row]
    before = np.cumsum([0, *map(len, built)])[:-1]
    tensor = before[lines.of[row]] + part

    number = np.full(len(lines.of), -1)
    number[lines.inputs] = np.arange(len(step.inputs))
    held = np.zeros(len(lines.of), dtype=bool)
    held[lines.inputs] = [spec.kind in _HELD for spec in step.inputs]
    random = lines.by_row([is_random(n) for n in lines.nodes])
    bound = lines.reached(random | held)

    root, item = lines.roots()
    view = np.array(views)[lines.of]
    calls = ~view[lines.reader]
    reader, looked = lines.reader[calls], lines.source[calls]
    uses = _spread(lines, tensors, root[looked], item[looked], many, begin)
    order = np.argsort(uses[0], kind="stable")
    storage, by = uses[0][order], reader[uses[1][order]]

    gradient = np.zeros(len(row), dtype=bool)
    out = lines.results[[spec.kind == "gradient" for spec in step.outputs]]
    gradient[_spread(lines, tensors, root[out], item[out], many, begin)[0]] = True
    floating = np.array([t.value.is_floating_point() for t in tensors], dtype=bool)
    width = np.array([t.value.element_size() for t in tensors], dtype=np.int64)
    return tensors, Storages(
        tensor=tensor,
        row=row,
        at=position[row],
        ahead=forward[row],
        value=number[row] < 0,
        input=number[row],
        common=~bound[row],
        kept=(random | lines.by_row([is_kept(n) for n in lines.nodes]))[row],
        released=released[row],
        floating=floating[tensor],
        gradient=gradient,
        replicated=lines.by_row([n.meta.get("replicated", False) for n in lines.nodes])[row],
        item_bytes=width[tensor],
        uses=(storage, by, position[by], forward[by]),
    )


def _spread(
    lines: Lines,
    tensors: tuple[Tensor, ...],
    root: np.ndarray,
    item: np.ndarray,
    many: np.ndarray,
    begin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(storages, which pair they are of) for pairs of a row and its item, -1 for all."""
    of = lines.of
    place: dict[tuple[fx.Node, int], int] = {}
    first: dict[fx.Node, int] = {}
    for number, tensor in enumerate(tensors):
        start = first.setdefault(tensor.node, number)
        place[tensor.node, tensor.item] = number - start
    whole = item < 0
    times = np.where(whole, many[root], 1)
    pair = np.repeat(np.arange(len(root)), times)
    result = begin[root[pair]] + np.arange(len(pair)) - (np.cumsum(times) - times)[pair]
    single = np.flatnonzero(~whole)
    if len(single):
        nodes = lines.nodes
        parts = {(int(r), int(i)): place[nodes[int(r)], int(i)]
                 for r, i in set(zip(of[root[single]].tolist(), item[single].tolist(),
                                     strict=True))}  # fmt: skip
        shift = np.zeros(len(root), dtype=np.int64)
        shift[single] = [parts[int(r), int(i)] for r, i in
                         zip(of[root[single]], item[single], strict=True)]  # fmt: skip
        result += shift[pair]
    return result, pair


def _tensors(node: fx.Node) -> list[Tensor]:
    values = node.meta.get("val")
    several = isinstance(values, (tuple, list))
    return [
        Tensor(node, item if several else -1)
        for item, value in enumerate(values if several else [values])
        if isinstance(value, torch.Tensor)
    ]
