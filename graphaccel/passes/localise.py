"""The graph of a plan's layout for the planner: sharded over its axes, sizes in examples.

The graph of a few examples is sharded, once, with the placements that are best for as many examples
as there are for each device. A call that was copied has the sizes it had, as
expressions, divided as its dims now are. Their number has a prime factor that no other size has,
so that what was put in between tells as well which of its dims count examples.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.compat.torch import pytree
from graphaccel.errors import GraphAccelError
from graphaccel.ir.layers import NotRepeated, copies
from graphaccel.passes.exact_microbatch import exact_microbatch
from graphaccel.passes.shard_axes import shard_axes
from graphaccel.planner.layouts import LocalGraph
from graphaccel.planner.lines import unfolded
from graphaccel.planner.plan import Plan

log = logging.getLogger("graphaccel.passes")

_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


def localised(
    step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None = None
) -> LocalGraph:
    """The step as each rank of the tensor, context and expert axes of `plan` runs it.

    sizes: symbol sizes of the batch, where they differ from the capture's.

    Raises BadPin (GA202) for placements that the graph does not allow.
    """
    if step.repeats is not None and step.even(dict(plan.placements)):
        try:
            return _repeated(step, plan, sizes)
        except (NotRepeated, GraphAccelError) as reason:  # errors are then those of the model
            log.info("all layers are sharded: %s", reason)
    return _localised(step, plan, sizes)


def _repeated(step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None) -> LocalGraph:
    """Shard few layers, and unfold what comes out."""
    few = step.repeats
    assert few is not None
    made = [_localised(each, plan, sizes) for each in (few.short, *few.longer)]
    if any(each.guessed for each in made):
        raise NotRepeated("some calls are not placed exactly")
    short, *longer = (each.step for each in made)
    local = replace(
        step, graph=short.graph, sizes=short.sizes, derived={},
        repeats=replace(few, short=short, longer=tuple(longer)),
    )  # fmt: skip
    partial = {n: axes for name, axes in made[0].partial.items() for n in copies(few.runs, name)}
    return LocalGraph(local, partial, {}, unfolded(local))


def _localised(step: StepGraph, plan: Plan, sizes: Mapping[sympy.Symbol, int] | None) -> LocalGraph:
    even = BATCH in step.sizes and plan.microbatch_size % plan.expert == 0
    prime = _prime(step, sizes or {}) if even else 1
    few = prime * plan.expert if even else plan.microbatch_size  # examples lie on the expert axis
    at = {**step.sizes, **(sizes or {}), **({BATCH: few} if BATCH in step.sizes else {})}
    alone = replace(plan, data=1, microbatches=1, batch=few)
    usual = max(1.0, plan.batch / plan.devices)
    counted = (prime, usual / few) if even else (1, 1.0)
    made = shard_axes(exact_microbatch(step, alone, at).graph, step, plan, examples=counted)
    for node in made.graph.graph.nodes:
        if "val" in node.meta:
            node.meta["dims"] = _dims(node, node.meta["val"], node.meta.get("dims"), at, prime)
    known = at if even else {s: n for s, n in at.items() if s != BATCH}
    if not even:
        for node in made.graph.graph.nodes:
            node.meta["dims"] = _numbers(node.meta.get("dims", ()), at)
    local = replace(step, graph=made.graph, sizes=known, derived={}, repeats=None)
    return LocalGraph(local, made.partial, made.guessed)


def _prime(step: StepGraph, sizes: Mapping[sympy.Symbol, int]) -> int:
    """A prime that divides no size of the graph for one example."""
    one = {**step.sizes, **sizes, BATCH: 1}
    found = {int(evaluate(d, one)) for node in step.graph.graph.nodes
             for d in pytree.tree_leaves(node.meta.get("dims", ()))}  # fmt: skip
    found = {n for n in found if n}
    return next((p for p in _PRIMES if not any(n % p == 0 for n in found)), _PRIMES[-1])


def _dims(node: fx.Node, value: Any, whole: Any, at: Mapping[sympy.Symbol, int], prime: int) -> Any:
    """Local sizes as expressions. whole: those before sharding, None for a call put in between."""
    if isinstance(value, (tuple, list)):
        parts = whole if whole else [None] * len(value)
        return tuple(_dims(node, v, d, at, prime) for v, d in zip(value, parts, strict=False))
    if not isinstance(value, torch.Tensor):
        return ()
    shape = [int(n) for n in value.shape]
    if node.target is operator.getitem:
        whole = node.args[0].meta["dims"][node.args[1]]
    if whole is not None and len(whole) == len(shape):
        return tuple(_share(d, n, at) for d, n in zip(whole, shape, strict=True))
    if prime > 1:
        return tuple(n if n % prime else sympy.Rational(n, at[BATCH]) * BATCH for n in shape)
    return tuple(shape)


def _share(whole: Any, size: int, at: Mapping[sympy.Symbol, int]) -> Any:
    if isinstance(whole, int):
        return size
    before = evaluate(whole, at)
    return whole if before == size else whole * sympy.Rational(size, int(before))


def _numbers(dims: Any, at: Mapping[sympy.Symbol, int]) -> Any:
    if isinstance(dims, tuple):
        return tuple(_numbers(d, at) for d in dims)
    return int(evaluate(dims, at))
