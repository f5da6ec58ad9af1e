"""Express sizes as functions of batch and sequence, by comparing captures at several sizes.

The captures are compared node by node. Export could keep the batch symbolic itself; comparing two
static captures was preferred because it treats every model alike (many specialise: windows folded
into the batch, caches, masks), leaves no symbolic integers in the graph that runs, and costs one
more capture of about the same time. Every dim and every integer argument of the zoo is affine in
the batch, and affine or quadratic in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

BATCH = sympy.Symbol("b", positive=True, integer=True)
SEQUENCE = sympy.Symbol("s", positive=True, integer=True)
SEQUENCES = sympy.symbols("s_1 s_2", positive=True, integer=True)
"""The lengths of a batch that has two."""
_CAST, _SUM = torch.ops.aten._to_copy.default, torch.ops.aten.add.Tensor


def same_structure(left: fx.GraphModule, right: fx.GraphModule, ratio: float) -> bool:
    """Whether two graphs are equal except for numbers: same ops, same edges.

    ratio: how much larger a size of the right one is. A float that differs must be a power of it
    (`_power`): two captures do not determine any other dependence.
    """
    a, b = list(left.graph.nodes), list(right.graph.nodes)
    if len(a) != len(b):
        return False
    number = {node: i for i, node in enumerate(a)} | {node: i for i, node in enumerate(b)}

    def wiring(node: fx.Node) -> list[int]:
        return [number[n] for n in node.all_input_nodes]

    def floats(node: fx.Node) -> list[int | float]:
        return [n for n in integers(node) if isinstance(n, float)]

    def grow(x: fx.Node, y: fx.Node) -> bool:
        one, other = floats(x), floats(y)
        return len(one) == len(other) and all(
            _same(m, n) or _power(m, n, ratio) is not None for m, n in zip(one, other, strict=True)
        )

    return all(
        x.op == y.op and str(x.target) == str(y.target) and wiring(x) == wiring(y) and grow(x, y)
        if x.op != "placeholder"
        else y.op == "placeholder"
        for x, y in zip(a, b, strict=True)
    )


def _same(value: float, other: float) -> bool:
    return value == other or (math.isnan(value) and math.isnan(other))


def _power(value: float, other: float, ratio: float) -> sympy.Rational | None:
    """The power of a size to which a float is proportional: the size, its root, or their
    inverses."""
    for power in (1, -1, 0.5, -0.5):
        if value and math.isclose(other / value, ratio**power, rel_tol=1e-9):
            exact: Any = sympy.Rational(power)
            return exact
    return None


def attach_sizes(
    graph: fx.GraphModule,
    base: Mapping[sympy.Symbol, int],
    others: Sequence[tuple[sympy.Symbol, int, fx.GraphModule]],
) -> None:
    """Set size expressions on every node of `graph`.

    others: captures that differ from `base` in one symbol: (symbol, its size there, graph).
    meta["dims"]: a tuple of int | sympy.Expr per tensor output (a tuple of those for several
    outputs). meta["sizes"]: {position: expression} for each integer of the arguments, in the order
    of `fx.map_aggregate` over (args, kwargs), that is not constant.
    """
    rows = [list(g.graph.nodes) for _, _, g in others]
    for index, node in enumerate(graph.graph.nodes):
        copies = [row[index] for row in rows]
        points = [(symbol, size) for symbol, size, _ in others]
        if "val" in node.meta:
            node.meta["dims"] = _dims(
                node.meta["val"], [t.meta["val"] for t in copies], base, points
            )
        own = integers(node)
        theirs = [integers(t) for t in copies]
        node.meta["sizes"] = {
            i: fitted
            for i, value in enumerate(own)
            if not isinstance(
                fitted := fit(value, [t[i] for t in theirs], base, points), (int, float)
            )
        }


def tells(
    graph: fx.GraphModule,
    base: Mapping[sympy.Symbol, int],
    others: Sequence[tuple[sympy.Symbol, int, fx.GraphModule]],
    there: fx.GraphModule,
    at: Mapping[sympy.Symbol, int],
) -> bool:
    """Whether captures that differ from `base` in one symbol each tell the sizes of a further one,
    `there`, with the sizes `at`: a sum of two lengths is none of what `fit` finds, nor is a
    quotient that is rounded. The shapes of indices and masks are not compared, as by `spacing`."""
    points = [(symbol, size) for symbol, size, _ in others]
    rows = [list(g.graph.nodes) for g in (graph, there, *(g for _, _, g in others))]
    calls = [[(n.op, _called(n), len(integers(n))) for n in row] for row in rows[:2]]
    if calls[0] != calls[1]:
        return False
    for node, built, *copies in zip(*rows, strict=True):
        if _computes(node):
            dims = _dims(node.meta["val"], [c.meta["val"] for c in copies], base, points)
            if _evaluated(dims, at) != _shapes(built.meta["val"]):
                return False
        known, *changed = (integers(n) for n in (node, *copies))
        for value, wanted, *various in zip(known, integers(built), *changed, strict=True):
            result = evaluate(fit(value, various, base, points), at)
            if not _same(result, wanted) and not math.isclose(result, wanted, rel_tol=1e-9):
                return False
    return True


def spacing(graph: fx.GraphModule, other: fx.GraphModule, size: int, there: int) -> int:
    """The distance of sizes at which what `fit` finds through two captures can be whole; 0 where
    two tell all sizes. graph, other: captured at `size` and at `there`.

    Where a size is divided, as by a convolution with a stride, two captures do not tell how the
    result is rounded, and neither do they for a float. Shapes of indices and masks
    (`ids[::4] = 0`) are not looked at: each batch is computed with its own.
    """
    distance, floats = 1, False
    for node, copy in zip(graph.graph.nodes, other.graph.nodes, strict=True):
        one, two = (_numbers(n) for n in (node, copy))
        for value, changed in zip(one, two, strict=True):
            if isinstance(value, float):
                floats |= not _same(value, changed)
            elif value and Fraction(int(changed), value) == Fraction(there, size) ** 2:
                distance = math.lcm(distance, Fraction(value, size**2).denominator)
            else:
                slope = Fraction(int(changed) - value, there - size)
                distance = math.lcm(distance, slope.denominator)
    return distance if floats or distance > 1 else 0


def _numbers(node: fx.Node) -> list[int | float]:
    """The sizes of what a node computes, and the numbers among its arguments."""
    shapes = _flat(_shapes(node.meta["val"])) if _computes(node) else []
    return [*map(int, shapes), *integers(node)]


def _computes(node: fx.Node) -> bool:
    """Whether a node's result has real numbers, not indices or masks alone."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(v, torch.Tensor) and not _is_index(v) for v in values)


def _is_index(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _flat(value: Any) -> list[Any]:
    return [n for part in value for n in _flat(part)] if isinstance(value, tuple) else [value]


def fraction_sizes(node: fx.Node) -> Iterator[sympy.Expr]:
    """The expressions of a node's whole numbers that are not whole at every size."""
    own = integers(node)
    whole = [e for i, e in node.meta.get("sizes", {}).items() if not isinstance(own[i], float)]
    for expression in (*_flat(node.meta.get("dims", ())), *whole):
        if isinstance(expression, sympy.Expr) and expression.as_numer_denom()[1] != 1:
            yield expression


def _called(node: fx.Node) -> str:
    return "" if node.op == "placeholder" else str(node.target)


def take_sizes(graph: fx.GraphModule, before: fx.GraphModule) -> bool:
    """Copy the sizes of `before`, set by `attach_sizes`, to `graph`, where each of its nodes,
    except casts and sums, makes the same call as one of `before` on the same inputs: then it has
    the same sizes for any batch. Returns False otherwise, and sets nothing.

    A cast has the sizes of its input, and so does a sum of tensors of equal sizes: gradients of a
    value that is read several times may be summed in another order.
    """
    numbers: dict[Any, int] = {}
    known: dict[int, dict[str, Any]] = {}
    for node, number in _numbered(before, numbers).items():
        known.setdefault(number, node.meta)  # the first: later ones may be casts of it
    results: dict[fx.Node, dict[str, Any]] = {}
    for node, number in _numbered(graph, numbers).items():
        if node.target is _CAST:
            results[node] = {**results[node.all_input_nodes[0]], "sizes": {}}
        elif number in known:
            results[node] = {k: known[number][k] for k in ("dims", "sizes") if k in known[number]}
        else:
            dims = [results[n]["dims"] for n in node.all_input_nodes]
            if node.target is not _SUM or not dims or any(d != dims[0] for d in dims):
                return False
            results[node] = {"dims": dims[0], "sizes": {}}
    for node, sizes in results.items():
        node.meta |= sizes
    return True


def _numbered(graph: fx.GraphModule, numbers: dict[Any, int]) -> dict[fx.Node, int]:
    """Nodes → numbers, equal for nodes that make the same call on the same inputs, whatever the
    dtypes. A cast has the number of its input; a sum is the same in any order."""
    results: dict[fx.Node, int] = {}
    terms: dict[int, tuple[int, ...]] = {}

    def key_of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "node", results[value]
        return "dtype" if isinstance(value, torch.dtype) else value

    for node in graph.graph.nodes:
        if node.target is _CAST:
            results[node] = results[node.all_input_nodes[0]]
            continue
        target = node.name if node.op == "placeholder" else str(node.target)
        plain = node.target is _SUM and not node.kwargs
        plain = plain and all(isinstance(a, fx.Node) for a in node.args)
        if plain:
            added = [t for a in node.args for t in terms.get(results[a], (results[a],))]
            call: Any = tuple(sorted(added))
        else:
            call = map_aggregate((node.args, dict(node.kwargs)), key_of)
        said = node.op, target, repr(call), _shapes(node.meta.get("val"))
        results[node] = numbers.setdefault(said, len(numbers))
        if plain:
            terms[results[node]] = call
    return results


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return tuple(map(_shapes, value)) if isinstance(value, (tuple, list)) else ()


def _dims(value: Any, others: list[Any], base: Mapping, points: list) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(
            fit(int(n), [int(o.shape[d]) for o in others], base, points)
            for d, n in enumerate(value.shape)
        )
    if isinstance(value, (tuple, list)):
        return tuple(_dims(v, [o[i] for o in others], base, points) for i, v in enumerate(value))
    return ()


def _evaluated(dims: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    if isinstance(dims, tuple):
        return tuple(_evaluated(d, sizes) for d in dims)
    return evaluate(dims, sizes)


def integers(node: fx.Node) -> list[int | float]:
    """Every number among the arguments, in order (booleans excluded)."""
    results: list[int | float] = []

    def collect(value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            results.append(value)
        return value

    map_aggregate((node.args, dict(node.kwargs)), collect)
    return results


def with_integers(node: fx.Node, values: Mapping[int, int | float]) -> tuple[tuple, dict]:
    """The node's (args, kwargs) with the numbers at some positions of `integers` replaced."""
    position = -1

    def substitute(value: Any) -> Any:
        nonlocal position
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            position += 1
            return values.get(position, value)
        return value

    replaced: Any = map_aggregate((node.args, dict(node.kwargs)), substitute)
    return replaced


def fit(
    value: int | float,
    others: Sequence[int | float],
    base: Mapping[sympy.Symbol, int],
    points: Sequence[tuple[sympy.Symbol, int]],
) -> Any:
    """The expression through `value` at `base` and `others` at the points that differ in one
    symbol.

    Affine in each symbol; proportional to its square where only that passes through both points. A
    float is proportional to a power of it (`_power`).
    The dependences on different symbols multiply (`b*s` tokens), as sizes of reshaped tensors do.
    """
    if all(_same(o, value) for o in others) or value == 0:
        return value
    return _fitted(value, tuple(others), tuple(base[symbol] for symbol, _ in points), tuple(points))


def is_fitted(
    value: int | float,
    others: Sequence[int | float],
    base: Mapping[sympy.Symbol, int],
    points: Sequence[tuple[sympy.Symbol, int]],
) -> bool:
    """Whether there is an expression of `fit`: floats that change by no power of a size have
    none."""
    return not isinstance(value, float) or all(
        _same(other, value) or _power(value, other, size / base[symbol]) is not None
        for other, (symbol, size) in zip(others, points, strict=True)
    )


@lru_cache(maxsize=1 << 16, typed=True)
def _fitted(
    value: int | float,
    others: tuple[int | float, ...],
    starts: tuple[int, ...],
    points: tuple[tuple[sympy.Symbol, int], ...],
) -> Any:
    """The expression of `fit` for a value that changes. starts: the base size of each point's
    symbol. A graph has few different sizes, and sympy takes a millisecond for each."""
    expression: Any = (
        sympy.Rational(Fraction(value)) if isinstance(value, float) else sympy.Integer(value)
    )
    for (symbol, size), start, other in zip(points, starts, others, strict=True):
        if other == value:
            continue
        if isinstance(value, float):
            power = _power(value, other, size / start)
            assert power is not None  # `same_structure` has checked it
            expression *= (symbol / start) ** power
            continue
        ratio = sympy.Rational(Fraction(other) / Fraction(value))
        if ratio == sympy.Rational(size, start) ** 2:
            expression *= (symbol / start) ** 2
        else:
            slope = (ratio - 1) / (size - start)
            expression *= sympy.expand(1 + slope * (symbol - start))
    return sympy.factor(expression)


def evaluate(expression: Any, sizes: Mapping[sympy.Symbol, int]) -> int | float:
    """The value of an expression at given sizes."""
    if isinstance(expression, (int, float)):
        return expression
    count = _counted(expression)
    if count is not None and expression.free_symbols <= sizes.keys():
        number = Fraction(count(sizes))
        return int(number) if number.denominator == 1 else float(number)
    result = expression.subs(sizes)
    return int(result) if result.is_integer else float(result)


@lru_cache(maxsize=1 << 16)
def _counted(expression: sympy.Expr) -> Callable[[Mapping], int | Fraction] | None:
    """Sizes → the exact number of a polynomial, without sympy; None for anything else."""
    if isinstance(expression, sympy.Symbol):
        return itemgetter(expression)
    if isinstance(expression, sympy.Rational):
        value = Fraction(expression.p, expression.q)
        known = int(value) if value.denominator == 1 else value
        return lambda _: known
    parts = [_counted(part) for part in expression.args]
    if not parts or None in parts:
        return None
    match: Any = parts
    if isinstance(expression, sympy.Add):
        return lambda sizes: sum(part(sizes) for part in match)
    if isinstance(expression, sympy.Mul):
        return lambda sizes: prod(part(sizes) for part in match)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        base, power = match[0], int(expression.exp)
        return lambda sizes: base(sizes) ** power
    return None
