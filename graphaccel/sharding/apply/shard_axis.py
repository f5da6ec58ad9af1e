"""Rewrite the joint graph for one rank of a mesh axis: local shapes and collectives.

before (tensor axis of 2, %w1 sharded on dim 0, %w2 on dim 1)
  %h: f32[8,64] = aten.mm(%x, %w1_t)                %h: f32[8,32] = aten.mm(%x, %w1_t)
  %y: f32[8,16] = aten.mm(%h, %w2_t)                %y: f32[8,16] = aten.mm(%h, %w2_t)
  %z: f32[8,16] = aten.add(%y, %x)                  %all_reduce: = all_reduce(%y, sum, tensor)
                                                    %wait_tensor: = wait_tensor(%all_reduce)
                                                    %z: f32[8,16] = aten.add(%wait_tensor, %x)

Placements are decided before (`sharding.rules.solution`). A conversion is inserted just before
the first call that needs it and is shared by all that do; one for a result alone, right after the
value is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from graphaccel.capture.export.export import GraphInput, GraphOutput
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.errors import BadPin
from graphaccel.ir.calls import arguments
from graphaccel.ir.fakes import Fakes
from graphaccel.ir.nodes import drop_dead, new_node
from graphaccel.ir.values import fake_like, operands, returned
from graphaccel.sharding.apply.graph_builder import Emitter, set_value
from graphaccel.sharding.apply.lowerings import items, lower
from graphaccel.sharding.apply.padding import Padding
from graphaccel.sharding.apply.token_dispatch import ChosenRows
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED
from graphaccel.sharding.rules.call_values import source_of
from graphaccel.sharding.rules.notation import output_shapes, tensor_arguments
from graphaccel.sharding.rules.shard import Placement, Row, Shard, passes_in_order
from graphaccel.sharding.rules.solution import Placements

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SIZES_FIRST = (
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten._efficientzerotensor.default,
)
_SIZES_SECOND = (
    aten.expand.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.select_backward.default,
    aten.diagonal_backward.default,
    aten.unfold_backward.default,
)
_SIZED = frozenset(
    {
        *_VIEWS, *_SIZES_FIRST, *_SIZES_SECOND, aten.slice.Tensor, aten.slice_backward.default,
        aten.split.Tensor, aten.split_with_sizes.default, aten.convolution_backward.default,
        aten.native_group_norm.default, aten.native_group_norm_backward.default,
        aten.affine_grid_generator.default,
    }
)  # fmt: skip


@dataclass(frozen=True)
class ShardedGraph:
    """graph: of one rank of the axis. held: shards of parameters and buffers, by name, where they
    are not replicated. partial: parameters whose gradient is still a partial sum over the axis."""

    graph: fx.GraphModule = field(repr=False)
    held: Mapping[str, Shard]
    partial: frozenset[str]


def shard_axis(
    module: fx.GraphModule,
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    placements: Placements,
    *,
    axis: str,
    ranks: int,
    keep_outputs: bool = False,
    fakes: Fakes | None = None,
) -> ShardedGraph:
    """The joint graph of concrete sizes as each of `ranks` ranks of `axis` runs it.

    fakes: for a graph that is measured and not run (`ir.fakes`); no code is then generated."""
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    with fake_mode_of(given) if fakes is None else nullcontext(), torch.no_grad():
        return _Sharding(
            module, inputs, outputs, placements, axis, ranks, keep_outputs, fakes
        ).build()


class _Sharding:
    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[GraphInput],
        outputs: Sequence[GraphOutput],
        placements: Placements,
        axis: str,
        ranks: int,
        keep_outputs: bool,
        fakes: Fakes | None,
    ) -> None:
        self.module, self.outputs, self.placements = module, outputs, placements
        self.ranks, self.keep_outputs = ranks, keep_outputs
        self.inputs = inputs
        self.graph = fx.Graph()
        self.emit = Emitter(self.graph, axis, ranks, "shard_axis", fakes)
        self.padding = Padding(self.emit)
        self.chosen = ChosenRows(self.emit)
        self.names = {node.name: node for node in module.graph.nodes}
        self.converted: dict[Any, dict[Placement, fx.Node]] = {}
        results = zip(returned(module), outputs, strict=True)
        # Outputs of the forward are converted in the forward, though a backward may read them
        # first.
        self.handed = {
            source_of(node)
            for node, spec in results
            if isinstance(node, fx.Node) and spec.kind in ("loss", "buffer", "output")
        }

    def build(self) -> ShardedGraph:
        held: dict[str, Shard] = {}
        specs = iter(self.inputs)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, next(specs, None), held)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
        partial: set[str] = set()
        results = [
            self._result(node, spec, held, partial)
            for node, spec in zip(returned(self.module), self.outputs, strict=True)
        ]
        self.graph.output(results).meta["phase"] = "output"
        built = graph_module(self.module, self.graph)
        drop_dead(built.graph)
        if self.emit.fakes is None:
            built.graph.lint()
            built.recompile()
        return ShardedGraph(built, held, frozenset(partial))

    def _placeholder(self, node: fx.Node, spec: GraphInput | None, held: dict[str, Shard]) -> None:
        new = self.graph.placeholder(node.name)
        new.meta = dict(node.meta)
        place = self.placements.held.get(node, REPLICATED)
        if isinstance(place, Shard):
            assert spec is not None
            held[spec.name] = place
            value = node.meta["val"]
            shape = place.local(value.shape, self.ranks)
            like = fake_like if self.emit.fakes is None else self.emit.fakes.like
            new.meta["val"] = like(value, shape)
            self.padding.add_zero(new)
        self.converted[(node, 0)] = {place: new}

    def _call(self, node: fx.Node) -> None:
        row = self.placements.rows.get(node)
        tensors = tensor_arguments(node)
        self.emit.meta = node.meta
        if row is None:
            row = Row((REPLICATED,) * len(tensors), (REPLICATED,) * len(output_shapes(node)))
        local = [self._given(t, need, node) for t, need in zip(tensors, row.inputs, strict=True)]
        self.emit.meta = node.meta
        local = self.padding.before(node, row, local)
        if row.lowering in ("expert_product", "expert_gradient"):  # expert ids of these rows
            local[-1] = self.chosen.ids(local[-1], int(arguments(node)["count"]))
        if row.lowering:
            results = lower(row.lowering, self.emit, node, local)
        else:
            results = self._copied(node, row, tensors, local)
        self.padding.after(node, row, local, results)
        for k, (result, place) in enumerate(zip(results, row.outputs, strict=True)):
            if isinstance(place, Shard) and place.by:
                result.meta["chosen"] = True
                if result.target is operator.getitem:
                    operands(result)[0].meta["chosen"] = True
            self.converted[(node, k)] = {place: result}

    def _copied(
        self, node: fx.Node, row: Row, tensors: list[fx.Node], local: list[fx.Node]
    ) -> list[fx.Node]:
        given = iter(local)

        def taken(value: fx.Node) -> fx.Node:
            return next(given) if value in tensors else value

        args: Any = fx.map_arg(node.args, taken)
        kwargs: Any = fx.map_arg(node.kwargs, taken) if node.kwargs else {}
        target = node.target
        if target in _VIEWS:
            target = aten.reshape.default if target is aten.view.default else target
        args = local_sizes(node, row, tuple(args), self.ranks)
        if target is aten.slice_backward.default and -1 in args[1]:
            gradient, sizes, dim, start, _, step = args
            if dim % len(sizes) != len(sizes) - 1:
                raise ValueError(f"{node.name} is a slice of rows that experts chose")
            return [self.chosen.slice_backward(gradient, sizes, start, step)]
        new = new_node(self.graph, node.op, target, args, kwargs, node.name, node.meta)
        new.meta.pop("sizes", None)
        set_value(new, self.emit.fakes)
        if isinstance(node.meta["val"], torch.Tensor):
            return [new]
        return items(self.emit, new)

    def _given(self, tensor: fx.Node, need: Placement | None, user: fx.Node) -> fx.Node:
        """A value in the placement in which a call reads it, converted if necessary."""
        value = source_of(tensor)
        known = self.converted[value]
        built = next(iter(known))
        if need is None:
            return known[built]
        if need not in known:
            self.emit.meta = tensor.meta if value in self.handed else user.meta
            start = built
            whole = self.placements.versions.get(value) == REPLICATED
            if whole and need != REPLICATED:
                start = REPLICATED  # kept replicated too: a slice of that is cheap
                if start not in known:
                    known[start] = self._converted(tensor, known[built], built, start, user)
            known[need] = self._converted(tensor, known[start], start, need, user)
            self.padding.add_zero(known[need])
        return known[need]

    def _converted(
        self, whole: fx.Node, node: fx.Node, source: Placement, target: Placement, user: fx.Node
    ) -> fx.Node:
        """A conversion of the local `node` of `whole`. To and from the ranks of chosen experts it
        goes through evenly sharded rows, where those are possible."""
        size = whole.meta["val"].shape
        if isinstance(source, Shard) and source.by:
            experts = self._experts(source, user)
            if target != PARTIAL and passes_in_order(source, size, self.ranks):
                node, source = self.chosen.send_back(node, source, experts), Shard(0)
            else:
                rows = int(size[source.dim])
                node, source = self.chosen.spread(node, source, experts, rows), PARTIAL
        if not (isinstance(target, Shard) and target.by):
            return self.emit.convert(node, source, target)
        experts = self._experts(target, user)
        if source != REPLICATED and passes_in_order(target, size, self.ranks):
            node = self.emit.convert(node, source, Shard(0))
            return self.chosen.send(node, target, experts)
        node = self.emit.convert(node, source, REPLICATED)
        return self.chosen.take(node, target, experts)

    def _experts(self, place: Shard, user: fx.Node) -> fx.Node:
        """The expert of every row of a placement, replicated."""
        meta, chosen = self.emit.meta, self.names[place.by]
        if source_of(chosen) not in self.converted:
            reason = f"{user.name} would be sent to its experts before {chosen.name} chooses them"
            raise BadPin(pin="expert", value=self.ranks, reason=reason)
        experts = self._given(chosen, REPLICATED, user)
        self.emit.meta = meta
        return experts

    def _result(
        self, node: Any, spec: GraphOutput, held: Mapping[str, Shard], partial: set[str]
    ) -> Any:
        if not isinstance(node, fx.Node):
            return node
        value = source_of(node)
        known = self.converted[value]
        built = next(iter(known))
        need: Placement = REPLICATED
        if spec.kind == "gradient":
            need = held.get(spec.name, REPLICATED)
            if built == PARTIAL and need == REPLICATED:
                partial.add(spec.name)
                return known[built]
        elif spec.kind == "output" and not self.keep_outputs:
            return known[built]
        before = next(iter(reversed(self.graph.nodes)))
        given = self._given(node, need, node)
        if spec.kind == "gradient" and isinstance(need, Shard):
            self.emit.meta = node.meta
            given = self.padding.zero(given, need)  # else an optimizer would update the padding
        self._move_up(before, known[built])
        return given

    def _move_up(self, before: fx.Node, built: fx.Node) -> None:
        """Move the nodes inserted after `before` for a value up to the first point where their
        inputs exist: at the end, sums that wait for it would keep their inputs alive until then."""
        added = list(takewhile(lambda n: n is not before, reversed(self.graph.nodes)))
        for node in reversed(added):
            after = max([built, *node.all_input_nodes])
            if after.op == "placeholder":
                after = self.graph.find_nodes(op="placeholder")[-1]
            after.append(node)


def local_sizes(node: fx.Node, row: Row, args: tuple, ranks: int) -> tuple:
    """A call's arguments with its sizes replaced by those of one rank."""
    target = node.target
    if not any(isinstance(p, Shard) for p in (*row.inputs, *row.outputs)):
        return args
    if target not in _SIZED and "upsample" not in str(target):
        return args
    changed, shapes = list(args), output_shapes(node)
    sizes = [
        _local_size(p, s, ranks) if isinstance(p, Shard) else list(s)
        for p, s in zip(row.outputs, shapes, strict=True)
    ]
    if target in _VIEWS or target in _SIZES_SECOND:
        changed[1] = sizes[0]
        if target is aten.new_empty_strided.default:
            changed[2] = _strides(sizes[0], changed[2])
    elif target in _SIZES_FIRST:
        changed[0] = sizes[0]
    elif target in (aten.slice.Tensor, aten.slice_backward.default):
        _local_slice(node, row, changed, ranks, sizes[0])
    elif target is aten.split.Tensor:
        dim = int(arguments(node)["dim"]) % len(shapes[0])
        changed[1] = sizes[0][dim]
    elif target is aten.split_with_sizes.default:
        dim = int(arguments(node)["dim"]) % len(shapes[0])
        changed[1] = [s[dim] for s in sizes]
    elif target is aten.convolution_backward.default:
        _local_bias(node, row, changed, ranks)
    elif target in (aten.native_group_norm.default, aten.native_group_norm_backward.default):
        at = 3 if target is aten.native_group_norm.default else 5
        changed[at] = sizes[0][0]
    elif target is aten.affine_grid_generator.default:
        changed[1] = [sizes[0][0], *changed[1][1:]]
    elif "upsample" in str(target) and "backward" in str(target):
        changed[2] = sizes[0]
    return tuple(changed)


def _strides(sizes: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Strides without gaps, in the order of those of the whole tensor."""
    results, step = [0] * len(sizes), 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (whole[dim], -dim)):
        results[dim] = step
        step *= max(sizes[dim], 1)
    return results


def _local_size(place: Shard, shape: Sequence[int], ranks: int) -> list[int]:
    """One rank's sizes; -1 for a size that is known at run time."""
    local = list(place.local(shape, ranks))
    if place.by:
        local[place.dim] = -1
    return local


def _local_slice(node: fx.Node, row: Row, changed: list[Any], ranks: int, local: list[int]) -> None:
    """Local arguments of slice(x, dim, start, end, step) and slice_backward(g, sizes, dim, start,
    end, step)."""
    given = arguments(node)
    backward = node.target is aten.slice_backward.default
    whole = output_shapes(node)[0] if backward else tensor_arguments(node)[0].meta["val"].shape
    dim = int(given["dim"]) % len(whole)
    if backward:
        changed[1] = local
    place = row.inputs[0]
    if not isinstance(place, Shard) or place.dim != dim:
        return
    at = 3 if backward else 2
    while len(changed) < at + 2:
        changed.append(None)
    size = int(whole[dim])
    start, end = given["start"] or 0, given["end"]
    start = start + size if start < 0 else min(start, size)
    end = size if end is None else (end + size if end < 0 else min(end, size))
    changed[at], changed[at + 1] = start // ranks, end // ranks


def _local_bias(node: fx.Node, row: Row, changed: list[Any], ranks: int) -> None:
    """convolution_backward(g, x, w, bias_sizes, ...): bias_sizes is the local number of filters."""
    sizes, gradient = changed[3], row.inputs[0]
    if sizes and isinstance(gradient, Shard) and gradient.dim == 1:
        changed[3] = [sizes[0] // ranks]
