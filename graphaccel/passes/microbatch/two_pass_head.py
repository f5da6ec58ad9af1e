"""Split the last stage's backward: what runs once on the whole batch becomes a head graph.

before: forward, and backward           after: forward, head, and backward
  %z = aten.mm(%x, %w)                    %z = aten.mm(%x, %w)
  return (%z)              # saved        return (%z)              # joined

  %w = whole_batch(%z, ...)               %s = aten.mm(%w, %w_t)
  %s = aten.mm(%w, %w_t)                  ...
  ...                                     return (%l, %g)
  %p = batch_part(%g, ...)
  %d = aten.mul(%p, %y)                   %d = aten.mul(%p, %y)
  return (%l, %d)                         return (%d)

The runtime runs the head between all forwards and all backwards: it joins or sums the values of all
parts of the batch, and passes each part its slice of the head's results (`runtime.head`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import operands, returned
from graphaccel.sharding.rules.parts import PART, WHOLE

_ONCE = ("loss", "output", "buffer")  # results of a backward that the head returns itself


def two_pass_head(programs: Sequence[StageProgram]) -> tuple[StageProgram, ...]:
    """The programs; the last one has a head."""
    return (*programs[:-1], _Carved(programs[-1]).program())


class _Carved:
    """The two graphs into which the backward of a stage is split."""

    def __init__(self, program: StageProgram) -> None:
        self.stage = program
        (self.backward,) = program.backwards.values()
        nodes = self.backward.graph.find_nodes(op="placeholder")
        self.given = dict(zip(nodes, program.backward_inputs, strict=True))
        self.results = list(zip(returned(self.backward), program.backward_outputs, strict=True))
        calls = [n for n in self.backward.graph.nodes if n.op == "call_function"]
        self.head = {n for n in calls if n.meta.get("head")}
        self.wholes = [n for n in calls if n.target is WHOLE]  # in the same order on all ranks

    def program(self) -> StageProgram:
        once = [(n, v) for n, v in self.results if v.kind in _ONCE]
        rest = [(n, v) for n, v in self.results if v.kind not in _ONCE]
        parts = self._parts(rest)
        leaving = dict.fromkeys(operands(n)[0] if n.target is PART else n for n in parts)
        handed = {n: Value("headed", n.name) for n in leaving}
        head, inputs = self._graph({n: _value(n) for n in self.wholes}, [*once, *handed.items()])
        read_by_head = {v.name for v in inputs}
        read = {n: _slice(n) for n in parts}
        backward, kept = self._graph(read, rest)
        saved = {v.name for v in kept if v.kind == "saved"}
        forward, outputs = self._forward(saved, read_by_head)
        return replace(
            self.stage,
            forward=forward,
            forward_outputs=outputs,
            backwards={(True, True): backward},
            backward_inputs=kept,
            backward_outputs=tuple(v for _, v in rest),
            head=head if once or handed else None,
            head_inputs=inputs,
            head_outputs=tuple(v for _, v in [*once, *handed.items()]),
        )

    def _parts(self, results: Sequence[tuple[fx.Node, Value]]) -> list[fx.Node]:
        """What the backward reads of the head: slices, or full values."""
        collected: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = [n for n, _ in results]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.target is PART or node in self.head:
                collected[node] = None
            else:
                stack += node.all_input_nodes
        order = {n: i for i, n in enumerate(self.backward.graph.nodes)}
        return sorted(collected, key=order.__getitem__)

    def _graph(
        self, given: dict[fx.Node, Value], results: Sequence[tuple[fx.Node, Value]]
    ) -> tuple[fx.GraphModule, tuple[Value, ...]]:
        """A graph that computes `results`, and its inputs: `given`, and the backward's."""
        needed: set[fx.Node] = set()
        stack = [n for n, _ in results]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack += () if node in given else node.all_input_nodes
        graph = fx.Graph()
        built: dict[fx.Node, fx.Node] = {}
        values = []
        for node, value in [*self.given.items(), *given.items()]:
            if node in needed:
                built[node] = graph.placeholder(node.name)
                built[node].meta = {**node.meta, "phase": "input"}
                values.append(value)
        for node in self.backward.graph.nodes:
            if node in needed and node not in built:
                built[node] = graph.node_copy(node, lambda n: built[n])
        graph.output([built[n] for n, _ in results]).meta["phase"] = "output"
        return graph_module(self.backward, graph), tuple(values)

    def _forward(self, saved: set[str], read: set[str]) -> tuple[fx.GraphModule, tuple[Value, ...]]:
        """The forward returns what the head reads, and saves what the backward still reads."""
        module = self.stage.forward
        built = dict(zip(self.stage.forward_outputs, returned(module), strict=True))
        results = {v: n for v, n in built.items() if v.kind != "saved" or v.name in saved}
        for whole in (n for n in self.wholes if n.name in read):
            source = self.given[operands(whole)[0]]
            results[_value(whole)] = built[Value("saved", source.name)]
        module.graph.output_node().args = (list(results.values()),)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module, tuple(results)


def _value(whole: fx.Node) -> Value:
    _, how, dim, outer, _ = operands(whole)
    return Value(how, whole.name, batch_dim=dim, outer=outer)


def _slice(node: fx.Node) -> Value:
    """What the backward reads: a value of the head, or a slice of one."""
    if node.target is PART:
        source, dim, outer, _ = operands(node)
        return Value("headed", source.name, batch_dim=dim, outer=outer)
    return Value("headed", node.name)
