"""Finds where fused ops match in a forward graph, and proves each match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.capture.differentiate import module_path
from graphaccel.capture.export.export import ForwardGraph
from graphaccel.capture.layers.blocks import block_of
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.ir.match import Near, Pattern, match_at
from graphaccel.kernels.register import wide_form
from graphaccel.kernels.spec import Function, Fusion, T
from graphaccel.passes.fusion.matmul_bias import MATMULS, adds_bias, matmul_in
from graphaccel.passes.fusion.site import LOW_DTYPES, Site, mismatch
from graphaccel.passes.fusion.variants import (
    Variant,
    example_pattern,
    pattern_text,
    reshapes_to_rows,
    traced,
)


class Finder:
    """Searches for fusions in one forward graph. near: fusion → the best match that failed."""

    def __init__(
        self, forward: ForwardGraph, chosen: tuple[Fusion, ...], trainable: frozenset[str]
    ) -> None:
        self.graph = forward.graph.graph
        self.nodes = list(self.graph.nodes)
        self.near: dict[str, Near] = {}
        self._chosen = chosen
        self._with_gradient = _with_gradient(forward, trainable)
        self._mode = fake_mode_of([n for n in self.nodes if n.op == "placeholder"])
        floats = {
            v.dtype
            for n in self.nodes
            if isinstance(v := n.meta.get("val"), Tensor) and v.is_floating_point()
        }
        self._lows = tuple(d for d in LOW_DTYPES if d in floats)
        self._proofs: dict[Any, Pattern | None] = {}

    def sites(self) -> tuple[Site, ...]:
        """Matches that do not overlap, in graph order; larger patterns have priority."""
        taken: set[fx.Node] = set()
        sites: list[Site] = []
        for fusion, variants, pattern in self._patterns():
            for place, node in enumerate(self.nodes):
                if node.target is not pattern.anchor.target:
                    continue
                if node in taken:
                    self._note(fusion, Near(0, pattern.size, node.name, "another fusion took it"))
                    continue
                result = self._at(fusion, variants, pattern, node, place, taken)
                if isinstance(result, Site):
                    taken |= set(result.inside)
                    sites.append(result)
                else:
                    self._note(fusion, result)
        return tuple(sorted(sites, key=lambda s: s.place))

    def _note(self, fusion: Fusion, near: Near) -> None:
        best = self.near.get(fusion.name)
        if best is None or near.matched > best.matched:
            self.near[fusion.name] = near

    def _patterns(self) -> list[tuple[Fusion, list[Variant], Pattern]]:
        """All patterns to match, the largest first. Functions with identical patterns in one dtype
        may differ in the dtype of a match: each is tried there."""
        patterns: list[tuple[Fusion, list[Variant], Pattern]] = []
        for fusion in self._chosen:
            seen: dict[str, list[Variant]] = {}
            for function in fusion.patterns:
                for variant in self._variants(fusion, function):
                    pattern = example_pattern(fusion, variant)
                    if pattern is None:
                        continue
                    text = pattern_text(pattern)
                    if text not in seen:
                        seen[text] = []
                        patterns.append((fusion, seen[text], pattern))
                    known = (function, variant.autocast)
                    if all((v.function, v.autocast) != known for v in seen[text]):
                        seen[text].append(variant)
        return sorted(patterns, key=lambda f: (-f[2].size, f[0].name))

    def _variants(self, fusion: Fusion, function: Function) -> Iterator[Variant]:
        for low in (None, *self._lows):
            plain = Variant(function, low, False)
            yield plain
            forms = (plain,) if low is None else (plain, replace(plain, autocast=True))
            yield from forms[1:]
            pattern = example_pattern(fusion, plain)
            if pattern is not None and reshapes_to_rows(fusion, pattern):
                yield from (replace(f, flat=True) for f in forms)
            if pattern is not None and adds_bias(fusion, pattern) is not None:
                yield from (replace(f, matmul=kind) for f in forms for kind in MATMULS)

    def _at(
        self,
        fusion: Fusion,
        variants: list[Variant],
        pattern: Pattern,
        node: fx.Node,
        place: int,
        taken: set[fx.Node],
    ) -> Site | Near:
        match = match_at(pattern, node)
        if isinstance(match, Near):
            return match

        def near(reason: str) -> Near:
            return Near(pattern.size, pattern.size, node.name, reason)

        if taken & set(match.nodes.values()):
            return near("another fusion took part of it")
        inputs = {
            name: match.inputs.get(name, None if isinstance(spec, T) else spec.default)
            for name, spec in fusion.inputs.items()
        }
        matmul = matmul_in(dict(match.nodes))
        if matmul is not None:
            inputs[matmul[0]] = matmul[1]
        tried = [(v, self._refused(fusion, v, inputs, node)) for v in variants]
        autocast = [v.autocast for v, reason in tried if reason is None]
        if not autocast:
            return near(next(reason for _, reason in tried if reason is not None))
        outputs = tuple(match.nodes[o] for o in pattern.outputs)
        inside = tuple(n for n in match.nodes.values() if n not in match.free)
        path = module_path(node)
        site = Site(fusion, place, path, inputs, outputs, inside, matmul=matmul)
        if not _has_position(inputs, outputs, set(inside)):
            return near("its outputs are read before its inputs are all there")
        if len(outputs) > 1 and len({block_of(module_path(n)) for n in inside}) > 1:
            # Between blocks there is one tensor, which is saved where blocks are recomputed and
            # sent between stages; a fused call across a boundary would read two and return two.
            return near("it would lie across the end of a block")
        reason = mismatch(site, self._mode)
        wide = fusion.rewrite is not None or wide_form(fusion) is not None
        if reason is not None and any(autocast) and wide:
            site = replace(site, wide=torch.float32)
            reason = reason if mismatch(site, self._mode) else None
        return site if reason is None else near(reason)

    def _refused(
        self,
        fusion: Fusion,
        variant: Variant,
        inputs: Mapping[str, Any],
        node: fx.Node,
    ) -> str | None:
        """Why a match is not replaced, or None."""
        values = {n: v.meta["val"] if isinstance(v, fx.Node) else v for n, v in inputs.items()}
        for name, spec in fusion.tensors.items():
            value = inputs[name]
            if value is None or value not in self._with_gradient:
                continue
            if not spec.differentiable:
                return f"`{name}` needs a gradient, and the op gives none"
            if not spec.low_grad and _first(values).dtype in LOW_DTYPES:
                return f"`{name}` needs a gradient, which is not for 16 bits"
        reason = _sizes_agree(fusion, values)
        if reason is None and fusion.legal is not None:
            reason = fusion.legal(**values)
        if reason is not None:
            return reason
        return self._proved(fusion, variant, values, node)

    def _proved(
        self, fusion: Fusion, variant: Variant, values: dict[str, Any], node: fx.Node
    ) -> str | None:
        """Trace the pattern at the shapes of the match: it must equal the match, node by node."""
        key = (
            variant,
            tuple(
                (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else v
                for v in values.values()
            ),
        )
        if key not in self._proofs:
            self._proofs[key] = traced(fusion, variant, values, exact=True)
        exact = self._proofs[key]
        if exact is None:
            return "the pattern can not be traced at these shapes"
        exact_match = match_at(exact, node, sizes=True)
        if isinstance(exact_match, Near):
            return f"not the same at these shapes: at {exact_match.node}, {exact_match.reason}"
        for mine, theirs in exact_match.nodes.items():
            a, b = mine.meta.get("val"), theirs.meta["val"]
            if isinstance(a, Tensor) and (a.dtype, a.shape) != (b.dtype, b.shape):
                return (
                    f"{theirs.name} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
                )
        return None


def _first(values: Mapping[str, Any]) -> Tensor:
    return next(v for v in values.values() if isinstance(v, Tensor))


def _with_gradient(forward: ForwardGraph, trainable: frozenset[str]) -> set[fx.Node]:
    """Nodes through which a gradient flows."""
    nodes: set[fx.Node] = set()
    specs = iter(forward.inputs)
    for node in forward.graph.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            if spec.kind == "parameter" and spec.name in trainable:
                nodes.add(node)
        elif node.op == "call_function" and "detach" not in str(node.target):
            value = node.meta.get("val")
            integer = isinstance(value, Tensor) and not value.is_floating_point()
            if not integer and any(n in nodes for n in node.all_input_nodes):
                nodes.add(node)
    return nodes


def _sizes_agree(fusion: Fusion, values: Mapping[str, Any]) -> str | None:
    """Equal index names must be equal sizes; a mask may be broadcast."""
    sizes: dict[str, int] = {}
    leading: tuple[int, ...] | None = None
    for name, spec in fusion.tensors.items():
        value = values[name]
        if value is None:
            continue
        shape, indices = list(value.shape), list(spec.indices)
        if "..." in indices:
            at = indices.index("...")
            count = len(shape) - len(indices) + 1
            if count < 0:
                return f"`{name}` has {len(shape)} dims, not {spec.dims}"
            dots = tuple(shape[at : at + count])
            shape[at : at + count], indices[at : at + 1] = [], []
            if not (spec.mask or spec.broadcast):
                if leading not in (None, dots):
                    return f"`{name}` is broadcast: {dots} against {leading}"
                leading = dots
        wide = spec.mask or spec.broadcast
        if wide and len(shape) < len(indices):
            indices = indices[len(indices) - len(shape) :]
        if len(shape) != len(indices):
            return f"`{name}` has {len(value.shape)} dims, not {spec.dims}"
        for index, size in zip(indices, shape, strict=True):
            wanted = int(index) if index.isdigit() else sizes.setdefault(index, size)
            if wanted != size and not (wide and size == 1):
                return f"`{name}` has size {size} where {index} is {wanted}"
    return None


def _has_position(
    inputs: Mapping[str, Any], outputs: tuple[fx.Node, ...], inside: set[fx.Node]
) -> bool:
    """Whether there is a place after every input and before every reader of an output."""
    if len(outputs) == 1:
        return True
    order = {n: i for i, n in enumerate(outputs[0].graph.nodes)}
    last = max((order[v] for v in inputs.values() if isinstance(v, fx.Node)), default=-1)
    users = [order[u] for o in outputs for u in o.users if u not in inside]
    return last < min(users, default=len(order))
