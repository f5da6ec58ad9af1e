"""Replace subgraphs that match a fused op with that op, before differentiation.

before                                                after
  %p: f32[8,16,32] = aten.pow(%x, 2)                    %r: (f32[8,16,32], f32[8,16,1]) =
  %m: f32[8,16,1] = aten.mean.dim(%p, [-1], True)            graphaccel.rms_norm(%x, %w, 1e-06)
  %a: f32[8,16,1] = aten.add.Tensor(%m, 1e-06)          %z: f32[8,16,32] = getitem(%r, 0)
  %s: f32[8,16,1] = aten.rsqrt(%a)
  %y: f32[8,16,32] = aten.mul.Tensor(%x, %s)
  %z: f32[8,16,32] = aten.mul.Tensor(%w, %y)

A match is found by structure, then proved: the pattern is traced anew at the very shapes and dtypes
of the match, must then be equal to it node by node, and the op's fake must return the dtype, shape
and stride of what it replaces. Patterns are functions in float32; their variants in 16 bits and
under autocast are derived. `GRAPHACCEL_FUEL=n` places only the first n: bisecting it finds a wrong
one. Matching before autograd needs one pattern a kernel, where joint patterns miss ordinary
training code (frozen weights, gradients that are added in another order).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphaccel.capture.export.export import ForwardGraph
from graphaccel.capture.patterns import simplify
from graphaccel.capture.stepgraph import StepGraph, assemble, of_few
from graphaccel.capture.symbols import integers
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.errors import BadFuel
from graphaccel.ir.values import propagate
from graphaccel.kernels.registry import fusion_named
from graphaccel.kernels.spec import Fusion
from graphaccel.passes.fusion.find import Finder
from graphaccel.passes.fusion.insert import insert, remove_layout_copies
from graphaccel.passes.fusion.site import Site, mismatch, site_in
from graphaccel.planner.plan.plan import Plan

aten = torch.ops.aten


def fuse(step: StepGraph, plan: Plan) -> StepGraph:
    """The step with the plan's fusions placed and differentiated anew; unchanged without any."""
    if not plan.fusions:
        return step
    return of_few(step, lambda few: _fused(few, plan))


def _fused(step: StepGraph, plan: Plan) -> StepGraph:
    chosen = tuple(fusion_named(name) for name in plan.fusions)
    keep = plan.outputs == "all"
    forward = _prepared(step.forward, keep)
    others = [(symbol, size, _prepared(f, keep)) for symbol, size, f in step.others]
    sites = Finder(forward, chosen, step.trainable).sites()
    sites = tuple(s for s in sites[: _fuel(len(sites))] if all(_fits(s, f) for _, _, f in others))
    if not sites:
        return step  # no need to differentiate anew
    nodes = list(forward.graph.graph.nodes)
    for _, _, other in others:
        counterparts = dict(zip(nodes, other.graph.graph.nodes, strict=True))
        _place(other, [site_in(s, counterparts) for s in sites])
    _place(forward, sites)
    return assemble(
        forward,
        tuple(others),
        step.sizes,
        step.batch_dims,
        step.tied,
        step.trainable,
        step.training,
        scaled=plan.precision.scaled,
    )


def _fuel(sites: int) -> int:
    """How many of the sites are placed. Raises: BadFuel (GA705)."""
    fuel_text = os.environ.get("GRAPHACCEL_FUEL")
    if fuel_text is None:
        return sites
    try:
        fuel = int(fuel_text)
    except ValueError:
        fuel = -1
    if fuel < 0:
        raise BadFuel(value=fuel_text, sites=sites)
    return fuel


def find_sites(
    step: StepGraph, chosen: tuple[Fusion, ...], *, keep_outputs: bool = False
) -> tuple[Finder, tuple[Site, ...]]:
    """The sites where fusions would be placed; `Finder.near` has the closest failed matches."""
    forward = _prepared(step.forward, keep_outputs)
    finder = Finder(forward, chosen, step.trainable)
    return finder, finder.sites()


def _fits(site: Site, other: ForwardGraph) -> bool:
    """Whether the op also matches at the other captured size with the same numbers (a factor that
    depends on a size would be taken for a constant)."""
    counterparts = dict(zip(site.outputs[0].graph.nodes, other.graph.graph.nodes, strict=True))
    for node in site.inside:
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            if integers(node) != integers(counterparts[node]):
                return False
    mode = fake_mode_of([n for n in counterparts.values() if n.op == "placeholder"])
    return mismatch(site_in(site, counterparts), mode) is None


def _prepared(forward: ForwardGraph, keep_outputs: bool) -> ForwardGraph:
    """A copy without no-op copies and, unless wanted, without what the model returns besides its
    loss: logits that nothing reads need not exist."""
    graph = fx.Graph()
    values: Any = graph.graph_copy(forward.graph.graph, {})
    outputs = forward.outputs
    if not keep_outputs and any(o.kind == "loss" for o in outputs):
        kept = [o.kind != "output" for o in outputs]
        values = [v for v, k in zip(values, kept, strict=True) if k]
        outputs = tuple(o for o, k in zip(outputs, kept, strict=True) if k)
    graph.output(values)
    module = graph_module(forward.graph, graph)
    module.graph.eliminate_dead_code()
    simplify(module)
    with fake_mode_of([n for n in module.graph.nodes if n.op == "placeholder"]):
        _cast_first(module.graph)
        _slice_first(module.graph)
    module.graph.eliminate_dead_code()
    simplify(module)
    return replace(forward, graph=module, outputs=outputs)


def _cast_first(graph: fx.Graph) -> None:
    """Move casts before transposes that only they read, as in patterns."""
    for node in list(graph.nodes):
        if node.target is not aten._to_copy.default or set(node.kwargs) != {"dtype"}:
            continue
        view = node.args[0]
        assert isinstance(view, fx.Node)
        if view.target is not aten.transpose.int or len(view.users) > 1:
            continue
        source, *dims = view.args
        assert isinstance(source, fx.Node)
        low = source.meta["val"].to(node.kwargs["dtype"])
        transposed = low.transpose(*dims)
        if transposed.stride() != node.meta["val"].stride():
            continue
        with graph.inserting_before(view):
            cast = graph.call_function(aten._to_copy.default, (source,), dict(node.kwargs))
        cast.meta = {**node.meta, "val": low}
        view.replace_input_with(source, cast)
        view.meta["val"] = transposed
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _slice_first(graph: fx.Graph) -> None:
    """Slice the rows before a matmul instead of after it (labels one position on: `linear(x)[:,
    :-1]`): the form of the patterns, and less work."""
    for node in list(graph.nodes):
        if node.target is not aten.slice.Tensor:
            continue
        linear, dim, *ends = node.args
        assert isinstance(linear, fx.Node)
        if linear.target is not aten.linear.default or len(linear.users) > 1:
            continue
        value = linear.meta["val"]
        if dim % value.dim() == value.dim() - 1 or value.dim() < 3:
            continue
        source, *weights = linear.args
        assert isinstance(source, fx.Node)
        with graph.inserting_before(linear):
            rows = graph.call_function(aten.slice.Tensor, (source, dim, *ends))
        rows.meta = {**node.meta, "val": aten.slice.Tensor(source.meta["val"], dim, *ends)}
        linear.args = (rows, *weights)
        values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in linear.args]
        linear.meta["val"] = aten.linear.default(*values)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)


def _place(forward: ForwardGraph, sites: Sequence[Site]) -> None:
    module = forward.graph
    with fake_mode_of([n for n in module.graph.nodes if n.op == "placeholder"]):
        moved: dict[fx.Node, fx.Node] = {}
        for site in sites:
            moved |= insert(module.graph, site, moved)
        remove_layout_copies(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    values: list[Any] = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    propagate(module, values)
