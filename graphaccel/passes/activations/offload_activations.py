"""Offload large activations to host memory between the forward and the backward.

before                                        after
  forward(%x, %w):  %y = aten.mm(%x, %w)        forward(%x, %w):  %y = aten.mm(%x, %w)
                    %z = aten.gelu(%y)                            %z = aten.gelu(%y)
                    return (%z, %y)                               %there = to_host(%y)
                                                                  return (%z, %there)
  backward(%g, %y): %d = gelu_backward(%g, %y)  backward(%g, %y): %here = to_device(%y)
                                                                  %d = gelu_backward(%g, %here)

A value is copied to the host after its last use in the forward and back before its first use in the
backward; in between the device does not hold it. The unit is a storage: what is saved of one
storage is one copy, from which the backward rebuilds the saved views. These stay on the device:
less than 1 MiB, what something else holds too (parameters, the batch, messages, outputs), and what
is recomputed anyway. Ren et al., ZeRO-Offload, 2021, have state and gradients on the host;
Rajbhandari et al., ZeRO-Infinity, 2021, §5.1.2, activations too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import is_dense, returned, shares, tensors_of
from graphaccel.kernels.host_copy import TO_DEVICE, TO_HOST
from graphaccel.planner.plan.offload import LARGE
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.cost import is_view

_STRIDED = torch.ops.aten.as_strided.default
_Memory = tuple[fx.Node, int]  # the node that allocates a storage, and which of its tensors it is


def offload_activations(program: StageProgram, plan: Plan) -> StageProgram:
    """The program with copies to the host and back, where the plan says so; bitwise the same."""
    if "activations" not in plan.offload or not program.backwards:
        return program
    forward = _Forward(program)
    chosen = [group for group in forward.groups() if group.bytes >= LARGE]
    if not chosen:
        return program
    for group in chosen:
        forward.send(group)
    gone = {place for group in chosen for place in group.places[1:]}
    kept = [place for place in range(len(forward.outputs)) if place not in gone]
    program.forward.graph.output_node().args = ([forward.outputs[place] for place in kept],)
    _finish(program.forward)
    inputs = [_fetched(m, program.backward_inputs, chosen) for m in program.backwards.values()]
    return replace(
        program,
        forward_outputs=tuple(program.forward_outputs[place] for place in kept),
        backward_inputs=inputs[0],
    )


@dataclass
class _Group:
    """What is saved of one storage. base: the tensor that fills it; bytes: of it. views: name under
    which it is saved → the views that lead there from base. places: positions among the forward's
    outputs."""

    base: fx.Node
    bytes: int
    views: dict[str, list[fx.Node]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)


class _Forward:
    """One stage's forward: the storage of each of its values, and its last reader."""

    def __init__(self, program: StageProgram) -> None:
        self.graph, self.values = program.forward.graph, program.forward_outputs
        self.outputs = list(returned(program.forward))
        self.memory: dict[fx.Node, tuple[_Memory, ...]] = {}
        self.last: dict[_Memory, fx.Node] = {}
        self.filled: dict[_Memory, fx.Node] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            own = self.memory[node] = self._memory(node)
            for source in (node, *node.all_input_nodes):
                for memory in self.memory[source]:
                    self.last[memory] = node
            if len(own) == 1 and own[0] not in self.filled and _fills(node):
                self.filled[own[0]] = node

    def _memory(self, node: fx.Node) -> tuple[_Memory, ...]:
        if node.op != "call_function":
            return tuple((node, i) for i, _ in enumerate(tensors_of(node.meta.get("val"))))
        memories: list[_Memory] = []
        for place, origin in enumerate(shares(node)):
            if origin is None:
                memories.append((node, place))
            elif origin[0] < 0:
                memories.append(memories[origin[1]])
            else:
                memories.append(self.memory[node.all_input_nodes[origin[0]]][origin[1]])
        return tuple(memories)

    def groups(self) -> list[_Group]:
        """Saved values by storage; without storages that something else keeps alive."""
        results: dict[_Memory, _Group | None] = {}
        for place, (node, value) in enumerate(zip(self.outputs, self.values, strict=True)):
            for memory in self.memory.get(node, ()):
                base = self.filled.get(memory)
                views = None if base is None or value.kind != "saved" else _way(base, node)
                if base is None or views is None or memory[0].op != "call_function":
                    results[memory] = None
                    continue
                bytes_held = base.meta["val"].untyped_storage().nbytes()
                group = results.setdefault(memory, _Group(base, bytes_held))
                if group is not None:
                    group.views[value.name] = views
                    group.places.append(place)
        return [group for group in results.values() if group is not None]

    def send(self, group: _Group) -> None:
        """Copy a storage to the host after its last use, and save that copy."""
        (memory,) = self.memory[group.base]
        value = group.base.meta["val"]
        with self.graph.inserting_after(self.last[memory]):
            flat = _call(self.graph, _STRIDED, (group.base, [value.numel()], [1], 0), group.base)
        with self.graph.inserting_after(flat):
            there = _call(self.graph, TO_HOST, (flat,), group.base)
        self.outputs[group.places[0]] = there


def _fills(node: fx.Node) -> bool:
    """Whether a value is one tensor that contains each byte of its storage once."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_dense(value):
        return False
    return value.numel() * value.element_size() == value.untyped_storage().nbytes()


def _way(base: fx.Node, node: fx.Node) -> list[fx.Node] | None:
    """The views that lead from `base` to `node`; None where another op is between them."""
    way: list[fx.Node] = []
    if node.meta["val"].dtype != base.meta["val"].dtype:
        return None
    while node is not base:
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return None
        way.append(node)
        (node,) = node.all_input_nodes
    return way[::-1]


def _fetched(
    module: fx.GraphModule, inputs: tuple[Value, ...], chosen: Sequence[_Group]
) -> tuple[Value, ...]:
    """Make a backward copy back what it reads, in place; returns its inputs."""
    graph = module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    known = {v.name: n for v, n in zip(inputs, placeholders, strict=True) if v.kind == "saved"}
    order = {node: i for i, node in enumerate(graph.nodes)}
    gone: set[fx.Node] = set()
    for group in chosen:
        saved = [known[name] for name in group.views]
        readers = {node: list(node.users) for node in saved}
        old, base = saved[0].meta["val"], group.base.meta["val"]
        users = [reader for own in readers.values() for reader in own]
        with graph.inserting_before(min(users, key=order.__getitem__)):
            # The value's storage is that of its readers, which may be views of it.
            here = _call(graph, TO_DEVICE, (saved[0],), group.base, phase="backward")
            here.meta["val"] = old.as_strided([base.numel()], [1], 0)
            shape = list(base.shape), list(base.stride()), 0
            built = {group.base: _call(graph, _STRIDED, (here, *shape), group.base, "backward")}
            for way, node in zip(group.views.values(), saved, strict=True):
                for view in way:
                    if view not in built:
                        args = fx.map_arg(view.args, built.__getitem__)
                        built[view] = _call(graph, view.target, args, view, "backward", view.kwargs)
                for reader in readers[node]:
                    reader.replace_input_with(node, built[way[-1] if way else group.base])
        with base.fake_mode:
            saved[0].meta["val"] = torch.empty(base.numel(), dtype=base.dtype, device=base.device)
        gone.update(saved[1:])
    for node in gone:
        graph.erase_node(node)
    _finish(module)
    return tuple(v for v, n in zip(inputs, placeholders, strict=True) if n not in gone)


def _call(
    graph: fx.Graph,
    target: Any,
    args: Any,
    like: fx.Node,
    phase: str = "forward",
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """A call with the value and provenance of `like`."""
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "shares", "bind")}
    node.meta.update(phase=phase, made_by="offload_activations")
    given = fx.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: n.meta["val"])
    value: Any = tensors_of(like.meta["val"])[0]  # a view may be several tensors
    with value.fake_mode:
        node.meta["val"] = target(*given[0], **given[1])
    return node


def _finish(module: fx.GraphModule) -> None:
    module.graph.lint()
    module.recompile()
