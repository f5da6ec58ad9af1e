"""Build the sharded graph that the planner profiles: local sizes, as expressions of the batch.

The graph of a few examples is sharded, once, with the placements that are best for as many examples
as there are in a step (`Plan.usual`). A copied call keeps its sizes as expressions, divided as its
dims are now sharded. The number of examples has a prime factor that no other size has, so that the
dims of inserted calls that count examples can be recognised too.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import sympy
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.errors import GraphAccelError
from graphaccel.ir.nodes import copy_nodes
from graphaccel.ir.replication.layers import NotRepeated, copies
from graphaccel.ir.values import operands
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.placement.solve_axes import (
    Request,
    SolvedGraph,
    Transfer,
    over_few,
    solve_axes,
)
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.layout_profiles import LocalGraph
from graphaccel.planner.profile.lines import unfolded
from graphaccel.sharding.apply.sharding_cache import ShardingCache
from graphaccel.sharding.solve.conversions import Counted

log = logging.getLogger("graphaccel.passes")

_LEAST = 13
"""The least number of examples in the graph that is sharded."""
_MOST = 64
"""How many multiples of it are tried for one at which all sizes are whole numbers."""


def sharded_graph(
    step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None = None
) -> LocalGraph:
    """The step as each rank of the tensor, context and expert axes of `plan` runs it.

    sizes: symbol sizes of the batch, where they differ from the capture's.

    Raises BadPin (GA202) for placements that the graph does not allow.
    """
    cache = step.analyses.cached((), ShardingCache)
    if step.repeats is not None and step.even(dict(plan.placements)):
        try:
            return _repeated(step, plan, sizes, cache)
        except (NotRepeated, GraphAccelError) as reason:  # then all layers are sharded
            log.info("all layers are sharded: %s", reason)
    return _sharded_graph(step, plan, sizes, cache)[0]


def _repeated(
    step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None, cache: ShardingCache
) -> LocalGraph:
    """Shard few layers, and unfold the result."""
    few = step.repeats
    assert few is not None
    built = over_few(few, lambda each, transfer: _sharded_graph(each, plan, sizes, cache, transfer))
    if any(each.guessed for each in built):
        raise NotRepeated("some calls are not placed exactly")
    short, *longer = (each.step for each in built)
    local = replace(
        step, graph=short.graph, sizes=short.sizes,
        repeats=replace(few, short=short, longer=tuple(longer)),
    )  # fmt: skip
    partial = {n: axes for name, axes in built[0].partial.items() for n in copies(few.runs, name)}
    return LocalGraph(local, partial, {}, unfolded(local))


def _sharded_graph(
    step: StepGraph,
    plan: Plan,
    sizes: Mapping[sympy.Symbol, int] | None,
    cache: ShardingCache,
    transfer: Transfer | None = None,
) -> tuple[LocalGraph, SolvedGraph]:
    even = BATCH in step.sizes and plan.microbatch_size % plan.expert == 0
    part, prime, at = _part(step, plan, sizes or {}, even, cache)
    counted = None
    if even:
        counted = Counted(prime, plan.usual / at[BATCH], examples=plan.usual)
    solved = solve_axes(part, step, Request(plan, counted=counted, cache=cache), transfer)
    graph, partial = solved.local.graph, solved.local.partial
    if plan.model_parallel_size == plan.context:  # other layouts are derived from it
        graph = _copied(graph)
    known = at if even else {s: n for s, n in at.items() if s != BATCH}
    local = _Local(at, prime)
    for node in graph.graph.nodes:
        if "val" in node.meta:
            dims = local.dims(node, node.meta["val"], node.meta.get("dims"))
            node.meta["dims"] = dims if even else local.numbers(dims)
    result = replace(step, graph=graph, sizes=known, repeats=None)
    return LocalGraph(result, partial, solved.guessed), solved


def _part(
    step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int], even: bool, cache: ShardingCache
) -> tuple[fx.GraphModule, int, Mapping[sympy.Symbol, int]]:
    """The graph of few examples that is sharded, its prime, and the symbol sizes in it."""
    own = plan.tensor, plan.context, plan.expert
    axes = tuple(sorted({math.prod(some) for n in range(4) for some in combinations(own, n)}))
    prime = _prime(step, sizes, axes, cache) if even else 1
    examples = (prime, plan.expert) if even else (plan.microbatch_size,)
    asked = step.graph, examples, tuple(sizes.items())
    if asked not in cache.parts:
        few = prime * plan.expert if even else plan.microbatch_size  # sharded over expert
        if even:  # half of the rows, as of `losses.topk(len(losses) // 2)`, is a whole number
            known = {**step.sizes, **sizes}
            most = range(few, _MOST * few, few)
            few = next((n for n in most if step.serves({**known, BATCH: n})), few)
        at = {**step.sizes, **sizes, **({BATCH: few} if BATCH in step.sizes else {})}
        alone = replace(plan, data=1, microbatches=1, batch=few)
        cache.parts[asked] = exact_microbatch(step, alone, at, cache.fakes).graph, prime, at
    return cache.parts[asked]


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    output = module.graph.output_node()
    graph.output(copy_nodes(graph, module.graph, known)).meta = dict(output.meta)
    return graph_module(module, graph)


def _prime(
    step: StepGraph, sizes: Mapping[sympy.Symbol, int], axes: tuple[int, ...], cache: ShardingCache
) -> int:
    """The least prime that divides no size of the graph for one example, nor a rank's part of it
    on one axis or several, which have these sizes; a part that is not a whole number is rounded
    up."""
    asked = step.graph, tuple(sizes.items()), axes
    if asked not in cache.primes:
        one = {**step.sizes, **sizes, BATCH: 1}
        dims = {d for node in step.graph.graph.nodes
                for d in pytree.tree_leaves(node.meta.get("dims", ()))}  # fmt: skip
        whole = {n for n in (int(evaluate(d, one)) for d in dims) if n}
        parts = {-(-n // axis) for n in whole for axis in axes}
        result = whole | {n for n in parts if n}  # -1 is a size of `losses[: len(losses) // 2 - 2]`
        prime = _LEAST
        while any(n % prime == 0 for n in result):
            prime = int(sympy.nextprime(prime))
        cache.primes[asked] = prime
    return cache.primes[asked]


class _Local:
    """Local sizes as expressions; each is computed once."""

    def __init__(self, at: Mapping[sympy.Symbol, int], prime: int) -> None:
        self.at, self.prime = at, prime
        self.shares: dict[tuple[Any, int], Any] = {}
        self.counts: dict[int, Any] = {}

    def dims(self, node: fx.Node, value: Any, whole: Any) -> Any:
        """whole: sizes before sharding, None for an inserted call."""
        if isinstance(value, (tuple, list)):
            parts = whole if whole else [None] * len(value)
            return tuple(self.dims(node, v, d) for v, d in zip(value, parts, strict=False))
        if not isinstance(value, torch.Tensor):
            return ()
        shape = [int(n) for n in value.shape]
        if node.target is operator.getitem:
            source, index = operands(node)
            whole = source.meta["dims"][index]
        if whole is not None and len(whole) == len(shape):
            return tuple(self._share(d, n) for d, n in zip(whole, shape, strict=True))
        return tuple(map(self._count, shape))

    def _share(self, whole: Any, size: int) -> Any:
        if isinstance(whole, int):
            return size
        if (whole, size) not in self.shares:
            before = int(evaluate(whole, self.at))
            share = whole if before == size else whole * sympy.Rational(size, before)
            self.shares[whole, size] = share
        return self.shares[whole, size]

    def _count(self, size: int) -> Any:
        if self.prime == 1 or size % self.prime:
            return size
        if size not in self.counts:
            self.counts[size] = sympy.Rational(size, self.at[BATCH]) * BATCH
        return self.counts[size]

    def numbers(self, dims: Any) -> Any:
        """Sizes as numbers."""
        if isinstance(dims, tuple):
            return tuple(map(self.numbers, dims))
        return int(evaluate(dims, self.at))
