"""Find where fused ops match in a forward graph, prove each match, and insert the ops."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphaccel.capture.blocks import block_of
from graphaccel.capture.causal import causal_attention
from graphaccel.capture.differentiate import module_path
from graphaccel.capture.export import ForwardGraph
from graphaccel.capture.patterns import trace_pattern
from graphaccel.compat.torch.fakes import fake_mode_of
from graphaccel.ir.match import Near, Pattern, match_at
from graphaccel.kernels.examples import LEADING, example
from graphaccel.kernels.register import narrowed, op_of, parameters, wide_form
from graphaccel.kernels.spec import Function, Fusion, Scalar, T
from graphaccel.passes.fusion.matmul_bias import (
    PRODUCTS,
    adds_bias,
    of_product,
    product_in,
    without_bias,
)
from graphaccel.passes.lower_precision import cast_graph

# Numbers in a pattern while it is traced for matching: unlike any other number, and valid
# probabilities where they have to be.
_SENTINEL, _WHOLE_SENTINEL = 0.7310585786300049, 73_105_857
_LOW = (torch.bfloat16, torch.float16)
aten = torch.ops.aten
_LAYOUTS = {aten.transpose.int, aten.permute.default}
_SETTLED = {aten.reshape.default, aten.clone.default, aten.contiguous.default}


@dataclass(frozen=True)
class Site:
    """One match. place: position of its last node in the graph, by which sites are ordered. inputs:
    name → node, number or None. outputs: the nodes it replaces, in the fusion's order. wide: dtype
    to which its inputs are cast first (by an op, inside): under autocast the pattern computes in
    it. product: the input (and its node, with the bias) whose matmul is computed without its
    bias."""

    fusion: Fusion
    place: int
    module: str
    inputs: Mapping[str, Any] = field(repr=False)
    outputs: tuple[fx.Node, ...] = field(repr=False)
    inside: tuple[fx.Node, ...] = field(repr=False)
    wide: torch.dtype | None = None
    product: tuple[str, fx.Node] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Variant:
    """A pattern function as traced: in 32 bits, in 16, or in 16 under autocast. product: the matmul
    whose bias it adds ("linear", "addmm"), or nothing. flat: `...` is one dim: reshapes to rows
    disappear."""

    function: Function
    low: torch.dtype | None
    autocast: bool
    product: str = ""
    flat: bool = False


class Finder:
    """Searches for fusions in one forward graph. near: fusion → the best match that failed."""

    def __init__(
        self, forward: ForwardGraph, chosen: tuple[Fusion, ...], trainable: frozenset[str]
    ) -> None:
        self.graph = forward.graph.graph
        self.nodes = list(self.graph.nodes)
        self.near: dict[str, Near] = {}
        self._chosen = chosen
        self._learned = _learned(forward, trainable)
        self._mode = fake_mode_of([n for n in self.nodes if n.op == "placeholder"])
        floats = {
            v.dtype
            for n in self.nodes
            if isinstance(v := n.meta.get("val"), Tensor) and v.is_floating_point()
        }
        self._lows = tuple(d for d in _LOW if d in floats)
        self._proofs: dict[Any, Pattern | None] = {}

    def sites(self) -> tuple[Site, ...]:
        """Matches that do not overlap, in graph order; larger patterns have priority."""
        taken: set[fx.Node] = set()
        found: list[Site] = []
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
                    found.append(result)
                else:
                    self._note(fusion, result)
        return tuple(sorted(found, key=lambda s: s.place))

    def _note(self, fusion: Fusion, near: Near) -> None:
        best = self.near.get(fusion.name)
        if best is None or near.matched > best.matched:
            self.near[fusion.name] = near

    def _patterns(self) -> list[tuple[Fusion, list[Variant], Pattern]]:
        """All patterns to match, the largest first. Functions with identical patterns in one dtype
        may differ in the dtype of a match: each is tried there."""
        found: list[tuple[Fusion, list[Variant], Pattern]] = []
        for fusion in self._chosen:
            seen: dict[str, list[Variant]] = {}
            for function in fusion.patterns:
                for variant in self._variants(fusion, function):
                    pattern = generic(fusion, variant)
                    if pattern is None:
                        continue
                    text = _text(pattern)
                    if text not in seen:
                        seen[text] = []
                        found.append((fusion, seen[text], pattern))
                    known = (function, variant.autocast)
                    if all((v.function, v.autocast) != known for v in seen[text]):
                        seen[text].append(variant)
        return sorted(found, key=lambda f: (-f[2].size, f[0].name))

    def _variants(self, fusion: Fusion, function: Function) -> Iterator[Variant]:
        for low in (None, *self._lows):
            plain = Variant(function, low, False)
            yield plain
            forms = (plain,) if low is None else (plain, replace(plain, autocast=True))
            yield from forms[1:]
            pattern = generic(fusion, plain)
            if pattern is not None and _makes_rows(fusion, pattern):
                yield from (replace(f, flat=True) for f in forms)
            if pattern is not None and adds_bias(fusion, pattern) is not None:
                yield from (replace(f, product=kind) for f in forms for kind in PRODUCTS)

    def _at(
        self,
        fusion: Fusion,
        variants: list[Variant],
        pattern: Pattern,
        node: fx.Node,
        place: int,
        taken: set[fx.Node],
    ) -> Site | Near:
        found = match_at(pattern, node)
        if isinstance(found, Near):
            return found

        def near(reason: str) -> Near:
            return Near(pattern.size, pattern.size, node.name, reason)

        if taken & set(found.nodes.values()):
            return near("another fusion took part of it")
        inputs = {
            name: found.inputs.get(name, None if isinstance(spec, T) else spec.default)
            for name, spec in fusion.inputs.items()
        }
        product = product_in(dict(found.nodes))
        if product is not None:
            inputs[product[0]] = product[1]
        tried = [(v, self._refused(fusion, v, inputs, node)) for v in variants]
        autocast = [v.autocast for v, reason in tried if reason is None]
        if not autocast:
            return near(next(reason for _, reason in tried if reason is not None))
        outputs = tuple(found.nodes[o] for o in pattern.outputs)
        inside = tuple(n for n in found.nodes.values() if n not in found.free)
        path = module_path(node)
        site = Site(fusion, place, path, inputs, outputs, inside, product=product)
        if not _can_stand(inputs, outputs, set(inside)):
            return near("its outputs are read before its inputs are all there")
        if len(outputs) > 1 and len({block_of(module_path(n)) for n in inside}) > 1:
            # Between blocks there is one tensor, which is saved where blocks are recomputed and
            # sent between stages; a fused call across a boundary would read two and return two.
            return near("it would lie across the end of a block")
        reason = unchanged(site, self._mode)
        wide = fusion.rewrite is not None or wide_form(fusion) is not None
        if reason is not None and any(autocast) and wide:
            site = replace(site, wide=torch.float32)
            reason = reason if unchanged(site, self._mode) else None
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
            if value is None or value not in self._learned:
                continue
            if not spec.differentiable:
                return f"`{name}` needs a gradient, and the op gives none"
            if not spec.low_grad and _first(values).dtype in _LOW:
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
            self._proofs[key] = _traced(fusion, variant, values, exact=True)
        exact = self._proofs[key]
        if exact is None:
            return "the pattern can not be traced at these shapes"
        again = match_at(exact, node, sizes=True)
        if isinstance(again, Near):
            return f"not the same at these shapes: at {again.node}, {again.reason}"
        for mine, theirs in again.nodes.items():
            a, b = mine.meta.get("val"), theirs.meta["val"]
            if isinstance(a, Tensor) and (a.dtype, a.shape) != (b.dtype, b.shape):
                return (
                    f"{theirs.name} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
                )
        return None


def _first(values: Mapping[str, Any]) -> Tensor:
    return next(v for v in values.values() if isinstance(v, Tensor))


def at(site: Site, twins: Mapping[fx.Node, fx.Node]) -> Site:
    """The same site in another graph of the same structure. twins: node → its counterpart."""
    inputs = {n: twins[v] if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    outputs = tuple(twins[n] for n in site.outputs)
    product = None if site.product is None else (site.product[0], twins[site.product[1]])
    inside = tuple(twins[n] for n in site.inside)
    return replace(site, inputs=inputs, outputs=outputs, inside=inside, product=product)


def unchanged(site: Site, mode: Any) -> str | None:
    """The op's fake must have dtype, shape and stride of what it replaces; returns why not. A
    result of a rewrite in another layout is copied into that of eager (`_rewritten`)."""
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in site.inputs.values()]
    with mode:
        try:
            made = (_widening(site) or _op(site))(*values)
        except (RuntimeError, IndexError, ValueError, TypeError) as problem:
            return f"it does not take these: {str(problem).splitlines()[0]}"
        made = [made] if isinstance(made, Tensor) else list(made)
        wanted = [o.meta["val"] for o in site.outputs]
        made = narrowed(site.fusion, made, wanted)
    copied = site.fusion.rewrite is not None and all(o.is_contiguous() for o in wanted)
    for name, new, old in zip(site.fusion.outputs, made, site.outputs, strict=False):
        was = old.meta["val"]
        for kind in ("dtype", "shape") if copied else ("dtype", "shape", "stride"):
            x, y = (v.stride() if kind == "stride" else getattr(v, kind) for v in (was, new))
            if x != y:
                return f"it would change the {kind} of `{name}` from {x} to {y}"
    return None


def emit(graph: fx.Graph, site: Site, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Insert a fused op (or the calls of a rewrite) in place of its match.

    moved: replacements of nodes that other sites replaced. Returns the replacements of this site.
    """
    inputs = {n: moved.get(v, v) if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    site = replace(site, inputs=inputs)
    order = {n: i for i, n in enumerate(graph.nodes)}
    needed = [v for v in site.inputs.values() if isinstance(v, fx.Node)]
    inside = set(site.inside)
    users = [u for o in site.outputs for u in o.users if u not in inside]
    last_input = max((order[n] for n in needed), default=-1)
    anchor = max(site.outputs, key=lambda n: order[n])
    first_user = min((order[u] for u in users), default=len(order))
    before = (
        anchor
        if order[anchor] < first_user
        else next(n for n, i in order.items() if i > last_input and n.op != "placeholder")
    )
    covers = tuple(n.name for n in site.inside)
    with graph.inserting_before(before):
        if site.product is not None:
            name, product = site.product
            site = replace(site, inputs={**site.inputs, name: without_bias(graph, product)})
        made = _calls(graph, site)
    for node in made.new:
        for key in ("nn_module_stack", "stack_trace"):
            if key in anchor.meta:
                node.meta[key] = anchor.meta[key]
        node.meta["made_by"] = f"fuse {site.fusion.name}"
    for old, new in zip(site.outputs, made.outputs, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda u: u not in inside)
    stands = dict(zip(site.outputs, made.outputs, strict=True))
    names = {new: old.name for old, new in stands.items()}
    for node in sorted(inside, key=lambda n: -order[n]):
        graph.erase_node(node)
    for new, name in names.items():
        new.name = name
    made.main.meta["covers"] = covers
    return stands


@dataclass
class _Made:
    """main: the call that stands for the fusion."""

    new: list[fx.Node]
    outputs: list[fx.Node]
    main: fx.Node


def _calls(graph: fx.Graph, site: Site) -> _Made:
    values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in site.inputs.values()]
    if site.fusion.rewrite is not None:
        return _rewritten(graph, site)
    op = _op(site)
    call = graph.call_function(op, tuple(site.inputs.values()))
    call.meta["val"] = op(*values)
    items = [call]
    if not isinstance(call.meta["val"], Tensor):
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(site.outputs))]
        for i, item in enumerate(items):
            item.meta["val"] = call.meta["val"][i]
    given = list(items)
    for i, (item, old) in enumerate(zip(items, site.outputs, strict=True)):
        kind = old.meta["val"].dtype
        if item.meta["val"].dtype != kind:  # `unchanged` allowed it
            given[i] = graph.call_function(aten._to_copy.default, (item,), {"dtype": kind})
            given[i].meta["val"] = item.meta["val"].to(kind)
    return _Made(list(dict.fromkeys((call, *items, *given))), given, call)


def _rewritten(graph: fx.Graph, site: Site) -> _Made:
    """The calls of a rewrite, traced at the shapes of the match."""
    rewrite = _widening(site)
    assert rewrite is not None
    values = {n: v.meta["val"] if isinstance(v, fx.Node) else v for n, v in site.inputs.items()}
    traced = trace_pattern(_partial(rewrite, values), values)
    made: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            made[node] = site.inputs[node.name]
        elif node.op == "call_function":
            made[node] = graph.node_copy(node, lambda n: made[n])
            arguments = fx.node.map_arg(
                (made[node].args, dict(made[node].kwargs)), lambda n: n.meta["val"]
            )
            made[node].meta = {"val": node.target(*arguments[0], **arguments[1])}
            if node.target is aten.scaled_dot_product_attention.default:
                causal_attention(made[node])
    new = [m for n, m in made.items() if n.op == "call_function"]
    outputs = []
    for output, old in zip(traced.outputs, site.outputs, strict=True):
        node = made[output]
        if node.meta["val"].stride() != old.meta["val"].stride():  # `unchanged` allowed it
            node = graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
            node.meta["val"] = old.meta["val"]
            new.append(node)
        outputs.append(node)
    return _Made(new, outputs, made[traced.outputs[-1]])


def drop_copies(graph: fx.Graph) -> None:
    """Remove layout copies, inserted with the fused ops, that only views read from which the next
    op makes the same tensor anyway (attention's output, whose heads are concatenated)."""
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or "fuse" not in node.meta.get("made_by", ""):
            continue
        source = node.all_input_nodes[0]
        found = _read_through(node, {node: source.meta["val"]})
        if found is None:
            continue
        for view, value in found.items():
            view.meta["val"] = value
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _read_through(copy: fx.Node, known: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor] | None:
    """Values of the views after a copy if it were removed; None where some reader depends on it."""
    stack = [copy]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target not in _LAYOUTS | _SETTLED or user.all_input_nodes != [node]:
                return None
            value = user.target(known[node], *user.args[1:], **user.kwargs)
            if user.target in _LAYOUTS:
                known[user] = value
                stack.append(user)
            elif value.stride() != user.meta["val"].stride():
                return None
    del known[copy]
    return known


def _widening(site: Site) -> Function | None:
    """A site's rewrite; casts its inputs first where the site computes in a wider dtype."""
    rewrite, wide = site.fusion.rewrite, site.wide
    if rewrite is None or wide is None:
        return rewrite
    names = tuple(site.fusion.inputs)

    def call(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(names, args, strict=False)) | kwargs
        low = {n for n, v in values.items() if isinstance(v, Tensor) and v.dtype in _LOW}
        return rewrite(**{n: v.to(wide) if n in low else v for n, v in values.items()})

    return call


def _op(site: Site) -> Any:
    form = site.fusion if site.wide is None else wide_form(site.fusion)
    assert form is not None
    return op_of(form)


def _partial(function: Function, values: Mapping[str, Any]) -> Function:
    """The function of its tensor arguments alone, by name; numbers and absent ones are fixed."""
    import inspect

    names = [n for n, v in values.items() if isinstance(v, Tensor)]
    fixed = {n: v for n, v in values.items() if n not in names}

    def call(**tensors: Tensor) -> Any:
        return function(**fixed, **tensors)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
    )
    return call


@cache
def generic(fusion: Fusion, variant: Variant) -> Pattern | None:
    """A pattern traced at example shapes, to match by structure; None where the function does not
    take that dtype."""

    def _table(name: str) -> bool:
        spec = fusion.inputs[name]
        return isinstance(spec, T) and (spec.mask or (spec.broadcast and not spec.differentiable))

    leading = (math.prod(LEADING),) if variant.flat else LEADING
    values = example(fusion, variant.low or torch.float32, leading=leading)
    for i, (name, spec) in enumerate(fusion.inputs.items()):
        if isinstance(spec, Scalar) and isinstance(spec.default, float):
            values[name] = _SENTINEL + i / 64
        elif isinstance(spec, Scalar) and not isinstance(spec.default, bool):
            values[name] = _WHOLE_SENTINEL + i
    if (
        variant.autocast and not variant.product
    ):  # weights stay wide, and masks and tables that the model computes
        values = {
            n: v.float()
            if isinstance(v, Tensor) and v.is_floating_point() and (v.dim() == 1 or _table(n))
            else v
            for n, v in values.items()
        }
    return _traced(fusion, variant, values, exact=False)


def _traced(
    fusion: Fusion, variant: Variant, values: Mapping[str, Any], *, exact: bool
) -> Pattern | None:
    names = parameters(variant.function)
    given = {n: values[n] for n in names}
    try:
        pattern = trace_pattern(variant.function, given)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # it does not take these shapes or dtypes
    if variant.autocast:
        assert variant.low is not None
        cast_graph(pattern.graph, variant.low)
    if variant.product:
        pattern = of_product(fusion, pattern, variant.product)
    return Pattern(pattern.graph, {}) if exact and pattern is not None else pattern


def _makes_rows(fusion: Fusion, pattern: Pattern) -> bool:
    """Whether a pattern reshapes, and its inputs may have any dims before the last."""
    leads = any("..." in spec.indices for spec in fusion.tensors.values())
    return leads and any(n.target is aten.reshape.default for n in pattern.graph.nodes)


def _text(pattern: Pattern) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in pattern.graph.nodes)


def _learned(forward: ForwardGraph, trainable: frozenset[str]) -> set[fx.Node]:
    """Nodes through which a gradient flows."""
    found: set[fx.Node] = set()
    specs = iter(forward.inputs)
    for node in forward.graph.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            if spec.kind == "parameter" and spec.name in trainable:
                found.add(node)
        elif node.op == "call_function" and "detach" not in str(node.target):
            value = node.meta.get("val")
            whole = isinstance(value, Tensor) and not value.is_floating_point()
            if not whole and any(n in found for n in node.all_input_nodes):
                found.add(node)
    return found


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


def _can_stand(
    inputs: Mapping[str, Any], outputs: tuple[fx.Node, ...], inside: set[fx.Node]
) -> bool:
    """Whether there is a place after every input and before every reader of an output."""
    if len(outputs) == 1:
        return True
    order = {n: i for i, n in enumerate(outputs[0].graph.nodes)}
    last = max((order[v] for v in inputs.values() if isinstance(v, fx.Node)), default=-1)
    users = [order[u] for o in outputs for u in o.users if u not in inside]
    return last < min(users, default=len(order))
