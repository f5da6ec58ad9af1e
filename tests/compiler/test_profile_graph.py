"""Graphs that are made to be measured are those that would run, however much they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import sympy
import torch
from torch import fx

from graphaccel.capture import stepgraph
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, SEQUENCE, evaluate, take_sizes
from graphaccel.compat.torch import pytree
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.ir.fakes import Fakes
from graphaccel.passes.lower_precision import lower_precision
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.placement.solve_axes import Request, solve_axes
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.apply.sharding_cache import ShardingCache

Captured = Callable[[str], StepGraph]
aten = torch.ops.aten


def told(graph: fx.Graph) -> list[object]:
    """Everything about each node that a planner reads."""

    def like(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        return [like(v) for v in value] if isinstance(value, (list, tuple)) else value

    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), like(n.meta.get("val")),
         n.meta.get("dims"), n.meta.get("bind"), n.meta.get("phase"), n.meta.get("module"))
        for n in graph.nodes
    ]  # fmt: skip


LAYOUTS = ({"tensor": 2}, {"tensor": 2, "context": 2}, {"context": 2}, {"tensor": 2})


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("gpt", LAYOUTS), ("mixtral", ({"tensor": 2}, {"tensor": 2, "expert": 2}))],
)
def test_a_draft_is_the_graph_that_would_run(
    captured: Captured, name: str, layouts: tuple[dict[str, int], ...]
) -> None:
    step, cache = captured(name), ShardingCache()
    part = exact_microbatch(step, Plan(1, batch=4), {**step.sizes, BATCH: 4}).graph
    for axes in layouts:
        plan = Plan(4, batch=4, sequence=False, **axes)
        real = solve_axes(part, step, Request(plan)).local
        draft = solve_axes(part, step, Request(plan, cache=cache)).local
        assert told(draft.graph.graph) == told(real.graph.graph)
        assert (draft.parameter_shards, draft.partial) == (real.parameter_shards, real.partial)


def test_layouts_are_the_same_in_any_order(captured: Captured) -> None:
    """What they share is not changed by any of them."""
    layouts = [{"tensor": 2}, {"tensor": 2, "context": 2}, {"context": 2}]
    found = []
    for order in (layouts, layouts[::-1]):
        step = replace(captured("gpt"))
        made = {
            str(axes): told(
                sharded_graph(step, Plan(4, batch=8, sequence=False, **axes)).step.graph.graph
            )
            for axes in order
        }
        found.append(made)
    assert found[0] == found[1]


def test_calls_alike_are_asked_once() -> None:
    asked = []

    def double(x: torch.Tensor, by: float) -> torch.Tensor:
        asked.append(by)
        return torch.add(x, by)

    fakes = Fakes()
    with fakes.mode:
        given = [torch.empty(4, 6), torch.empty(4, 6), torch.empty(6, 4).t()]
        made = [fakes.call(double, (x, 1), {}) for x in given]
        whole = fakes.call(double, (torch.empty(4, dtype=torch.int64), 1), {})
        part = fakes.call(double, (torch.empty(4, dtype=torch.int64), 1.0), {})
    assert made[0] is made[1]
    assert [m.stride() for m in made] == [(6, 1), (6, 1), (1, 4)]
    assert (whole.dtype, part.dtype) == (torch.int64, torch.float32)
    assert len(asked) == 4


def test_nodes_stand_for_their_values() -> None:
    fakes, graph = Fakes(), fx.Graph()
    node = graph.placeholder("x")
    with fakes.mode:
        node.meta["val"] = torch.empty(4, 6).t()
        made = fakes.call(aten.cat.default, ([node, node], 1), {})
        assert (
            fakes.call(aten.cat.default, ([node.meta["val"], torch.empty(4, 6).t()], 1), {}) is made
        )
    assert made.shape == (6, 8)


def test_tensors_of_other_shapes_are_alike() -> None:
    fakes = Fakes()
    with fakes.mode:
        x = torch.empty(4, 6, dtype=torch.float16).t()
        made = fakes.call(aten.clone.default, (torch.empty(6, 2, dtype=torch.float16),), {})
    part = fakes.like(x, (6, 2))
    assert part is made is fakes.like(x, [6, 2])
    assert (part.dtype, part.stride()) == (torch.float16, (2, 1))
    assert fakes.like(x, (6, 4)).stride() == (1, 6)


def test_tensors_of_another_mode_are_taken() -> None:
    one, other = Fakes(), Fakes()
    with other.mode:
        x = torch.empty(4, 6).t()
    with one.mode:
        assert one.call(aten.mm.default, (x, torch.empty(4, 3)), {}).shape == (6, 3)


def test_sizes_are_what_sympy_says(captured: Captured) -> None:
    """Of every expression that capture left on a model, and of some that it does not."""
    rng, b, s = Random(3), BATCH, SEQUENCE
    found = {b * s / 3 + sympy.Rational(1, 2), (b + 1) ** 2 * s, sympy.Max(b, 2 * s), s / b}
    for node in captured("gpt").graph.graph.nodes:
        found |= set(pytree.tree_leaves(node.meta.get("dims", ())))
        found |= set(node.meta.get("sizes", {}).values())
    assert len(found) > 10
    for expression in sorted(found, key=str):
        sizes = {b: rng.randint(1, 99), s: rng.randint(1, 99)}
        exact = sympy.sympify(expression).subs(sizes)
        number = evaluate(expression, sizes)
        assert number == (int(exact) if exact.is_integer else float(exact))
        assert isinstance(number, int) == bool(exact.is_integer)


@pytest.mark.parametrize(("name", "compute"), [("gpt", "bf16"), ("llama", "bf16-params")])
def test_a_graph_with_casts_has_the_sizes_it_had(
    captured: Captured, name: str, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As differentiating the other captures says too, which is then left out."""
    step = replace(captured(name))
    plan = Plan(1, precision=PRECISIONS[compute])
    taken, shape_bounds = [], []
    for use in (True, False):

        def take(*graphs: fx.GraphModule, use: bool = use) -> bool:
            taken.append(use and take_sizes(*graphs))
            return taken[-1]

        monkeypatch.setattr(stepgraph, "take_sizes", take)
        made = lower_precision(step, plan)
        nodes = made.graph.graph.nodes
        shape_bounds.append([(n.name, n.meta.get("dims"), n.meta.get("sizes")) for n in nodes])
    assert taken == [True, False]
    assert shape_bounds[0] == shape_bounds[1]


def test_another_graph_has_other_sizes(captured: Captured) -> None:
    one, other = captured("gpt").graph, captured("llama").graph
    assert not take_sizes(one, other)
    assert take_sizes(one, one)
