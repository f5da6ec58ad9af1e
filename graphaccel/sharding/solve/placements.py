"""Place every tensor of a step on one mesh axis, at the least cost of compute and communication.

Every call of the joint graph picks one of its strategies (`sharding.rules.strategies`), every
parameter the placement in which it is stored. The result of a call may be converted before another
reads it, at the price of a collective; a value that several calls read may be kept in a second
placement, converted once for all of them. The sum of compute and conversions is minimised exactly
by variable elimination (`sharding.solve.variable_elimination`).

Nothing here refers to tensor, sequence, vocabulary or expert parallelism: they are what the solver
finds, depending on which dims may be sharded on the axis (`sharding.solve.shardable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.ir.calls import counted_packet, is_causal
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.call_values import Value, shapes_of, source_of, tensor_of
from graphaccel.sharding.rules.notation import output_shapes, tensor_arguments
from graphaccel.sharding.rules.ops import collectives
from graphaccel.sharding.rules.shard import Placement, Row, Shard, Shards
from graphaccel.sharding.rules.solution import Placements
from graphaccel.sharding.solve.conversions import ALL, Counted, Rates
from graphaccel.sharding.solve.conversions import conversion_seconds as priced
from graphaccel.sharding.solve.refusals import refusal
from graphaccel.sharding.solve.shardable import Shardable
from graphaccel.sharding.solve.variable_elimination import Table, cheapest_assignment

# The worth of a byte of stored parameter, in memory passes for each example (memory is scarce).
_STATE_PASSES = 64
_LATE = 0.5  # share of a gradient all-reduce's cost that is not overlapped
_UNFINISHED = frozenset(collectives.RULES) - {torch.ops._c10d_functional.wait_tensor.default}
_FRACTION = 8  # of a median message: the most that latency costs


def solve_placements(
    graph: fx.Graph, inputs: Sequence[GraphInput], outputs: Sequence[GraphOutput], **options: Any
) -> Placements:
    """Place a joint graph on an axis. options: as `placement_problem` takes them.

    Raises ValueError for pins that no strategy allows.
    """
    return placement_problem(graph, inputs, outputs, **options).solve()


def placement_problem(
    graph: fx.Graph,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    *,
    axis: str,
    ranks: int,
    rates: Rates,
    pins: Mapping[str, Placement],
    sequence: bool = True,
    keep_outputs: bool = False,
    counted: Counted = ALL,
    context_by: str = "",
    inner: int = 1,
) -> PlacementProblem:
    """The problem of placing a joint graph of concrete sizes (`meta["val"]`) on an axis of `ranks`.

    inputs, outputs: what the first placeholders and the results are. axis: "tensor" (features and,
    if `sequence`, the sequence), "context" (the sequence) or "expert" (examples and experts). pins:
    placements of parameters by name. keep_outputs: the model's outputs are wanted replicated.
    counted: which costs count. context_by: how attention is sharded on the context axis
    (`Plan.context_by`). inner: ranks that divide its heads further.
    """
    space = Shardable(
        graph, inputs, outputs, axis, ranks, pins, sequence, keep_outputs, context_by, inner
    )
    return PlacementProblem(space.spread(), rates, counted)


class PlacementProblem:
    """The costs of all placements of a graph's tensors on an axis, and the cheapest of them."""

    def __init__(self, space: Shardable, rates: Rates, counted: Counted = ALL) -> None:
        self.space, self.ranks, self.rates = space, space.ranks, rates
        self.counted, self.late = counted, _LATE * counted.late
        self._costs: dict[Any, np.ndarray] = {}
        self._alive: list[object] = []
        self._columns: dict[Any, tuple[Any, ...]] = {}
        self._seconds: dict[Shards, tuple[Placement | None, ...]] = {}
        self._converted: dict[Any, float] = {}
        self._known_moved: dict[Value, tuple[float, bool, bool, bool]] = {}
        self.latency = self._latency()

    def solve(self) -> Placements:
        """The cheapest placements. Raises ValueError where pins allow none."""
        try:
            return self._eliminated()
        except ValueError as error:
            said = refusal(self.space) or f"{error} on axis {self.space.axis}"
            raise ValueError(said) from error

    def _latency(self) -> float:
        """Seconds of a hop, capped at a fraction of the time of a median message.

        Without the cap small models would never be sharded, though an axis was asked for.
        """
        sizes = [
            self._bytes(tensor_of((n, 0)))
            for n in self.space.calls
            if counted_packet(n) in flop_registry
        ]
        usual = float(np.median(sizes)) if sizes else 0.0
        return min(self.rates.latency, usual / _FRACTION / self.rates.bandwidth)

    def _eliminated(self) -> Placements:
        variables: dict[Any, int] = {}
        choices: list[Sequence[Any]] = []
        for node in self.space.held:
            variables[node] = len(choices)
            choices.append(self.space.stored_placements(node))
        for node in self.space.calls:
            variables[node] = len(choices)
            choices.append(self.space.rows[node])
        users = self.space.users()
        for value, uses in users.items():
            if len(uses) > 1 and value[0] in variables and value[0] not in self.space.held:
                variables[value] = len(choices)
                choices.append(self.second_places(value))
        tables = list(self._tables(variables, choices, users))
        result = cheapest_assignment([len(c) for c in choices], tables)
        chosen = {key: choices[i][result.values[i]] for key, i in variables.items()}
        names = {i: key for key, i in variables.items()}
        return Placements(
            {n: chosen[n] for n in self.space.calls},
            {n: chosen[n] for n in self.space.held},
            {k: p for k, p in chosen.items() if isinstance(k, tuple) and p is not None},
            result.cost,
            tuple(n for i in result.guessed if isinstance(n := names[i], fx.Node)),
        )

    def second_places(self, value: Value) -> tuple[Placement | None, ...]:
        """The placements in which a value may be kept besides the one in which it is computed."""
        shards = self.space.shards[value]
        if shards not in self._seconds:
            self._seconds[shards] = (None, REPLICATED, *sorted(shards))
        return self._seconds[shards]

    def readable(self, value: Value, placements: Placements, need: Placement | None) -> bool:
        """Whether a value can be read in a placement: as it is computed, or converted from that or
        from its replicated second placement, as `sharding.apply.shard_axis` converts it."""
        source = placements.of(value)
        if need is None or need == source:
            return True
        if placements.versions.get(value) == REPLICATED and need != REPLICATED:
            source = REPLICATED
        return self.conversion(value, source, need) < inf

    def results(self, placements: Placements) -> Iterator[tuple[Value, Placement, str]]:
        """What the step returns: the value, the placement that it needs, and what it is. The
        gradient of a replicated parameter may stay a partial sum."""
        held = {spec.name: placements.of((n, 0)) for n, spec in self.space.kinds.items()}
        for node, spec in self.space.outputs:
            if not isinstance(node, fx.Node):
                continue
            value, need = source_of(node), REPLICATED
            if spec.kind == "output" and not self.space.keep_outputs:
                continue
            if spec.kind == "gradient":
                need = held.get(spec.name, REPLICATED)
                if need == REPLICATED and placements.of(value) == PARTIAL:
                    continue
            yield value, need, " ".join(filter(None, (f"the {spec.kind}", spec.name)))

    def _tables(
        self,
        variables: Mapping[Any, int],
        choices: Sequence[Sequence[Any]],
        users: Mapping[Value, Sequence[tuple[fx.Node, int]]],
    ) -> Iterator[Table]:
        for node in self.space.held:
            costs = [self._held_seconds(node, p) for p in choices[variables[node]]]
            yield Table((variables[node],), np.array(costs))
        for node in self.space.calls:
            yield Table((variables[node],), self._rows_seconds(node))
        gradients = self._gradients(variables)
        for value, uses in users.items():
            node = value[0]
            if node not in variables:  # the same on every rank: slices are free
                for user, position in uses:
                    if position >= 0:
                        costs = self._conversions(value, (REPLICATED,), self._needs(user, position))
                        yield Table((variables[user],), costs[0])
                continue
            own = choices[variables[node]]
            built = own if node in self.space.held else self._computed_in(node, value[1])
            if value not in variables:
                for user, position in uses:
                    yield from self._pair(variables, value, built, user, position, gradients)
                continue
            kept = choices[variables[value]]
            yield Table((variables[node], variables[value]), self._conversions(value, built, kept))
            for user, position in uses:
                yield self._triple(variables, value, built, kept, user, position, gradients)

    def _gradients(self, variables: Mapping[Any, int]) -> dict[Value, list[fx.Node]]:
        """Value → the parameters it is the gradient of."""
        by_name = {spec.name: n for n, spec in self.space.kinds.items() if spec.kind == "parameter"}
        results: dict[Value, list[fx.Node]] = {}
        for node, spec in self.space.outputs:
            if spec.kind == "gradient":
                results.setdefault(source_of(node), []).append(by_name[spec.name])
        return results

    def _pair(
        self,
        variables: Mapping[Any, int],
        value: Value,
        built: Sequence[Placement],
        user: fx.Node,
        position: int,
        gradients: Mapping[Value, Sequence[fx.Node]],
    ) -> Iterator[Table]:
        node = value[0]
        if position >= 0:
            costs = self._conversions(value, built, self._needs(user, position))
            if user is node:
                costs = np.diagonal(costs)
                yield Table((variables[node],), costs)
            else:
                yield Table((variables[node], variables[user]), costs)
            return
        for parameter in gradients.get(value, ()):
            stored = self.space.stored_placements(parameter)
            costs = self._conversions(value, built, stored) * self.late
            yield Table((variables[node], variables[parameter]), costs)
        if value not in gradients:
            yield Table((variables[node],), self._conversions(value, built, (REPLICATED,))[:, 0])

    def _triple(
        self,
        variables: Mapping[Any, int],
        value: Value,
        built: Sequence[Placement],
        kept: Sequence[Placement | None],
        user: fx.Node,
        position: int,
        gradients: Mapping[Value, Sequence[fx.Node]],
    ) -> Table:
        """A user reads the value as computed or in its second placement, whichever is cheaper."""
        if position >= 0:
            needs, third = self._needs(user, position), variables[user]
        elif value in gradients:
            parameter = gradients[value][0]
            needs, third = self.space.stored_placements(parameter), variables[parameter]
        else:
            needs, third = (REPLICATED,), -1
        late = self.late if position < 0 and value in gradients else 1.0
        key = self._moved(value), late, id(built), id(kept), id(needs)
        if key not in self._costs:
            direct = self._conversions(value, built, needs) * late
            second = np.array([[self._convert_second(value, k, n) for n in needs] for k in kept])
            costs = np.minimum(direct[:, None, :], second[None, :, :])
            self._costs[key] = self._kept_alive(costs, built, kept, needs)
        costs = self._costs[key]
        if third < 0:
            return Table((variables[value[0]], variables[value]), costs[:, :, 0])
        return Table((variables[value[0]], variables[value], third), costs)

    def _convert_second(
        self, value: Value, kept: Placement | None, need: Placement | None
    ) -> float:
        """Seconds to convert a second placement to the one needed. Rows on the ranks of their
        experts serve only readers of that placement: all else is converted from the first
        placement."""
        if kept is None or (isinstance(kept, Shard) and kept.by and need != kept):
            return inf
        return self.conversion(value, kept, need)

    def _needs(self, user: fx.Node, position: int) -> tuple[Placement | None, ...]:
        """The placement a call needs of an argument, by strategy; one object for equal
        strategies."""
        rows = self.space.rows[user]
        key = id(rows), "needs", position
        if key not in self._columns:
            self._columns[key] = tuple(row.inputs[position] for row in rows)
        return self._columns[key]

    def _computed_in(self, node: fx.Node, item: int) -> tuple[Placement, ...]:
        """The placement in which a result is computed, by strategy; one object for equal
        strategies."""
        rows = self.space.rows[node]
        key = id(rows), "made", item
        if key not in self._columns:
            self._columns[key] = tuple(row.outputs[item] for row in rows)
        return self._columns[key]

    def _conversions(
        self, value: Value, built: Sequence[Placement], needs: Sequence[Placement | None]
    ) -> np.ndarray:
        key = self._moved(value), id(built), id(needs)
        if key not in self._costs:
            costs = np.array([[self.conversion(value, p, q) for q in needs] for p in built])
            self._costs[key] = self._kept_alive(costs, built, needs)
        return self._costs[key]

    def _kept_alive(self, costs: np.ndarray, *by: object) -> np.ndarray:
        """`costs`, after keeping alive the objects in `by`, whose ids are its key."""
        self._alive.append(by)
        return costs

    def _moved(self, value: Value) -> tuple[float, bool, bool, bool]:
        """What the conversions of a value depend on: bytes, whether it is floating, whether it is
        still in flight, and whether it is a parameter or a view of one."""
        if value not in self._known_moved:
            tensor, unfinished = tensor_of(value), value[0].target in _UNFINISHED
            results = self._bytes(tensor), tensor.is_floating_point(), unfinished
            self._known_moved[value] = *results, value[0] in self.space.stored
        return self._known_moved[value]

    def conversion(self, value: Value, source: Placement, target: Placement | None) -> float:
        """Seconds to convert a value; infinite where there is no conversion."""
        if target is None or source == target:
            return 0.0
        size, floating, unfinished, stored = self._moved(value)
        if unfinished:  # only the wait may read it
            return inf
        key = (size, floating, source, target, stored)
        if key not in self._converted:
            self._converted[key] = self.conversion_seconds(*key)
        return self._converted[key]

    def conversion_seconds(
        self, size: float, floating: bool, source: Placement, target: Placement, held: bool
    ) -> float:
        """Seconds to convert a tensor of `size` bytes (`sharding.solve.conversions`)."""
        return priced(size, floating, source, target, held, self.ranks, self.rates, self.latency)

    def _held_seconds(self, node: fx.Node, placement: Placement) -> float:
        """The worth of a placement's memory: gradients and optimizer state shrink with it."""
        if self.space.kinds[node].kind != "parameter":
            return 0.0
        value = node.meta["val"]
        share = 1 if placement == REPLICATED else self.ranks
        return _STATE_PASSES * self.counted.examples * value.nbytes / share / self.rates.memory

    def _rows_seconds(self, node: fx.Node) -> np.ndarray:
        """Seconds of each strategy of a call; computed once for equal calls with equal
        strategies."""
        key = self.space.kind[node], id(self.space.rows[node])
        if key not in self._costs:
            work = self._work(node)
            costs = [self.row_seconds(node, row, work) for row in self.space.rows[node]]
            self._costs[key] = np.array(costs)
        return self._costs[key]

    def row_seconds(self, node: fx.Node, row: Row, work: float) -> float:
        """Seconds of a strategy of a call that takes `work` seconds unsharded."""
        share = self.ranks if row.divided else 1
        if row.lowering == "causal":  # with a mask, so no half of the scores is skipped
            work *= 2
        seconds = work / share + (self.rates.launch if work else 0.0)
        if row.gathered:
            width = tensor_of((node, 0)).element_size()
            passing = (
                self._share(row.gathered)
                * row.gathered
                * width
                * (self.ranks - 1)
                / self.ranks
                / self.rates.bandwidth
            )
            seconds += 2 * (passing + (self.ranks - 1) * self.latency)
        return seconds + self._kept_bytes(node, row) / self.rates.memory / 64

    def _kept_bytes(self, node: fx.Node, row: Row) -> float:
        """Bytes a rank writes: between equal costs, the smaller wins."""
        total = 0.0
        for k, placement in enumerate(row.outputs):
            tensor = tensor_of((node, k))
            share = self.ranks if isinstance(placement, Shard) else 1
            total += self._bytes(tensor) / share
        return total

    def _work(self, node: fx.Node) -> float:
        if (
            getattr(node.target, "is_view", False)
            or node.target is torch.ops.aten._unsafe_view.default
        ):
            return 0.0
        tensors = [a.meta["val"] for a in dict.fromkeys(tensor_arguments(node))]
        tensors += [tensor_of((node, k)) for k in range(len(output_shapes(node)))]
        seconds = sum(map(self._bytes, tensors)) / self.rates.memory
        formula = flop_registry.get(counted_packet(node))
        if formula is not None:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), shapes_of)
            out = shapes_of(node)
            share = next((s for t in tensors if (s := self._share(t.numel())) != 1.0), 1.0)
            flops = formula(*args, **kwargs, out_val=out) * (0.5 if is_causal(node) else 1.0)
            seconds = max(seconds, flops * share / self.rates.flops)
        return seconds

    def _share(self, elements: int) -> float:
        """The share of a tensor of so many elements that is counted."""
        return self.counted.share if elements % self.counted.number == 0 else 1.0

    def _bytes(self, tensor: torch.Tensor) -> float:
        return tensor.numel() * tensor.element_size() * self._share(tensor.numel())
