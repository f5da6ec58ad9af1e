"""Preserve `torch.no_grad()` regions of a forward: detach their inputs from the gradient.

exported                                                after
  %s: = get_attr[submod_1]                                (in submod_1, before anything else)
  %y: = wrap_with_set_grad_enabled(False, %s, %h)         %h_1: = aten.detach(%h)

Export represents such a region as a subgraph, and drops the no-grad mode when it inlines that
subgraph. So the region's inputs that have a gradient are detached first; inputs without one (masks,
rotary tables) stay as they are.

An op that returns its own argument (`x.to(x.dtype)`, dropout in evaluation) makes no new tensor, so
no-grad mode does not apply to it; yet export takes what it returns for a value of the region, and
reads that value wherever the argument is used afterwards. Such ops are removed first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.ops import grad_region, is_composite, schema, written_arguments

aten = torch.ops.aten


_COPY = "write to a copy that has its gradient:  x = x + (x.clamp(-1, 1) - x).detach()"


class WrittenWithoutGrad(Exception):
    """A value with a gradient is changed in place where gradients are not recorded: eager mode
    continues as if it had not been changed. node: the write. parameter: the name of what is
    written, if it is one.

    stack_trace: where. help_line: what to write instead.
    """

    def __init__(self, node: fx.Node, parameter: str) -> None:
        self.stack_trace = node.meta.get("stack_trace") or ""
        self.parameter = parameter
        name = str(node.target).split(".")[1]
        what, self.help_line = "a value that has a gradient", _COPY
        if parameter:
            what = f"the parameter `{parameter}`"
            rest = ", ".join(map(repr, node.args[1:]))
            plain = not any(n is not node.args[0] for n in node.all_input_nodes) and not node.kwargs
            call = f"{name}({rest})" if plain else "copy_(value)"
            self.help_line = (
                "leave that to the script, after optimizer.step():  with torch.no_grad(): "
                f"model.get_parameter({parameter!r}).{call}"
            )
        super().__init__(
            f"{what} is changed in place ({name}) under torch.no_grad(), or through detach() or "
            ".data, which the gradient would not know of"
        )


def detach_regions(graph: fx.GraphModule, parameters: Mapping[str, str]) -> None:
    """Rewrite an exported graph in place, before it is made functional.

    parameters: placeholders of trained parameters → their names in the model.

    Raises WrittenWithoutGrad.
    """
    given = [n for n in graph.graph.nodes if n.op == "placeholder"]
    tracked = {n for n in given if n.name in parameters or _wants_gradient(n)}
    named = {n: parameters[n.name] for n in given if n.name in parameters}
    _walk(graph, tracked, named)


def _walk(graph: fx.GraphModule, tracked: set[fx.Node], named: Mapping[fx.Node, str]) -> None:
    """tracked: nodes with a gradient, initially placeholders; grows to all nodes. named: parameters
    by placeholder."""
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        seen.add(node)
        if node.op != "call_function":
            continue
        region = grad_region(node)
        if region is not None:
            enabled, name, inputs = region
            inner = getattr(graph, name)
            if not enabled:
                _remove_identities(inner, node, inputs)
            places = [n for n in inner.graph.nodes if n.op == "placeholder"]
            pairs = list(zip(places, inputs, strict=True))
            within = {place for place, source in pairs if source in tracked}
            known = {place: named[source] for place, source in pairs if source in named}
            if not enabled:
                _detach(inner, within, known)
            else:
                _walk(inner, within, known)
                if within:
                    tracked.add(node)
            inner.forward = fx.Interpreter(inner).run  # what traces it then sees its nodes' lines
            continue
        for written in written_arguments(node):
            if any(value in tracked for value in _behind_detach(written)):
                raise WrittenWithoutGrad(node, named.get(_root(written), ""))
        if node.target is aten.detach.default or not any(
            source in tracked for source in node.all_input_nodes
        ):
            continue
        tracked.add(node)
        for written in written_arguments(node):
            behind = _behind_detach(written)
            if behind:
                tracked.add(next(n for n in _looks_at(written) if n.target is aten.detach.default))
                _cut_reads(graph, behind[-1], node, seen)
            else:
                tracked.add(_root(written))


def _cut_reads(graph: fx.GraphModule, base: fx.Node, write: fx.Node, seen: set[fx.Node]) -> None:
    """Read the base of a detached view without a gradient after a write through the view, which
    has one: eager mode gives it to the view alone."""
    users = [u for u in base.users if u not in seen]
    if users:
        with graph.graph.inserting_after(write):
            apart = graph.graph.call_function(aten.detach.default, (base,))
        apart.meta = {
            k: write.meta[k] for k in ("nn_module_stack", "stack_trace") if k in write.meta
        }
        apart.meta["val"] = base.meta["val"].detach()
        for user in users:
            user.replace_input_with(base, apart)


def _remove_identities(inner: fx.GraphModule, call: fx.Node, inputs: tuple[fx.Node, ...]) -> None:
    """Replace results that are an argument itself by that argument, in a region and after it."""
    for node in list(inner.graph.nodes):
        for same, source in _identities(node):
            same.replace_all_uses_with(source)
    results: Any = inner.graph.output_node().args[0]
    places = inner.graph.find_nodes(op="placeholder")
    source_of = dict(zip(places, inputs, strict=True))
    for read, number in _reads(call):
        if results[number] in source_of:
            read.replace_all_uses_with(source_of[results[number]])


def _identities(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(result, argument) of an op that returns an argument itself, found by running it."""
    op: Any = node.target
    if not hasattr(op, "_schema") or op._schema.is_mutable or not is_composite(op):
        return []
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    arguments = {id(n.meta["val"]): n for n in node.all_input_nodes}
    result = op(*args, **kwargs)
    several = isinstance(result, (list, tuple))
    pairs = [(r, result[i]) for r, i in _reads(node)] if several else [(node, result)]
    return [(read, arguments[id(value)]) for read, value in pairs if id(value) in arguments]


def _reads(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """The nodes that read one of several results, with its number."""
    return [(u, u.args[1]) for u in node.users if u.target is operator.getitem]


def _detach(graph: fx.GraphModule, tracked: set[fx.Node], named: Mapping[fx.Node, str]) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function":
            for written in written_arguments(node):
                if _root(written) in tracked:
                    raise WrittenWithoutGrad(node, named.get(_root(written), ""))
    body = next(n for n in graph.graph.nodes if n.op != "placeholder")
    for place in [n for n in graph.graph.nodes if n in tracked]:
        with graph.graph.inserting_before(body):
            apart = graph.graph.call_function(aten.detach.default, (place,))
        users = [u for u in place.users if u is not apart]
        for user in users:
            user.replace_input_with(place, apart)
        like = users[0].meta if users else {}
        apart.meta = {k: like[k] for k in ("nn_module_stack", "stack_trace") if k in like}
        apart.meta["val"] = place.meta["val"].detach()
    graph.recompile()


def _wants_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _root(node: fx.Node) -> fx.Node:
    """The base of a view, of a view of a view, or of an in-place result."""
    *_, last = _looks_at(node)
    return last


def _behind_detach(node: fx.Node) -> list[fx.Node]:
    """The values that a value is a view of through `detach`, its base last; none without one."""
    values = list(_looks_at(node))
    first = next((i for i, n in enumerate(values) if n.target is aten.detach.default), len(values))
    return values[first + 1 :]


def _looks_at(node: fx.Node) -> Iterator[fx.Node]:
    """A value, and the values that it is a view of, one after another."""
    yield node
    while node.op == "call_function" and hasattr(node.target, "_schema"):
        first = next(iter(schema(node)), None)
        if first is None or first.alias_info is None or not isinstance(node.args[0], fx.Node):
            return
        node = node.args[0]
        yield node
