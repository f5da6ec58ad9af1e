"""Prefetch parameters that are offloaded to the host: copied to the device one block ahead.

before                                        after (w and v of two blocks; on the host)
  %w, %v = input                                %w, %v = input
                                                %up: f32[64,32] = ahead(%w)
                                                %here: f32[64,32] = arrived(%up)
                                                %up_1: f32[32,64] = ahead(%v)
  %y: = aten.mm(%x, %w)                         %y: = aten.mm(%x, %here)
                                                %here_1: f32[32,64] = arrived(%up_1)
  %z: = aten.mm(%y, %v)                         %z: = aten.mm(%y, %here_1)

What a block reads is copied where the block before starts to compute, and freed after its last use;
the backward copies it a second time. What is read outside of blocks is copied one by one. Under
ZeRO 3 the flat shard of a group is copied so, and gathered from there.
`planner.estimate.parameter_prefetch` estimates the cost. Rajbhandari et al., ZeRO-Infinity, 2021,
§5.1.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.capture.layers.blocks import block_of
from graphaccel.ir.program import StageProgram, Value
from graphaccel.kernels.host_copy import AHEAD, ARRIVED
from graphaccel.planner.estimate.parameter_prefetch import Use, runs_of
from graphaccel.planner.plan.plan import Plan


def upload_parameters(program: StageProgram, plan: Plan) -> StageProgram:
    """The program whose graphs copy parameters from the host, where the plan keeps them there; in
    place, bitwise identical."""
    if "parameters" in plan.offload:
        _upload(program.forward, program.forward_inputs)
        for backward in program.backwards.values():
            _upload(backward, program.backward_inputs)
    return program


def _upload(module: fx.GraphModule, values: Sequence[Value]) -> None:
    """Insert in one graph the copies of what it reads, in place."""
    nodes = list(module.graph.nodes)
    inputs = (n for n in nodes if n.op == "placeholder")
    kinds = {n: v.kind for n, v in zip(inputs, values, strict=True)}
    held = [n for n, kind in kinds.items() if kind in ("parameter", "shards") and n.users]
    if not held:
        return
    position = {node: i for i, node in enumerate(nodes)}
    uses = []
    for node in held:
        for user in node.users:
            at = position[user]
            if kinds[node] == "shards":  # sent for one block, where another one computes
                uses.append(Use(at, at, "", (node, at), 0))
            else:
                uses.append(Use(at, at, block_of(user.meta.get("module", "")), node, 0))
    runs = [_read(run, nodes) for run in runs_of(uses)]
    like = {node: node.meta["val"] for node in held}
    for node in held:  # views among the readers are now of the copy's storage
        node.meta["val"] = torch.empty_like(like[node])
    copies = _issued(runs[0], like, next(n for n in nodes if n.op != "placeholder"))
    for number, reads in enumerate(runs):
        first = min((user for user, _ in reads), key=position.__getitem__)
        here = {n: _call(first, ARRIVED, copy, like[n]) for n, copy in copies.items()}
        for user, node in reads:
            user.replace_input_with(node, here[node])
        if number + 1 < len(runs):
            copies = _issued(runs[number + 1], like, first)
    module.graph.lint()
    module.recompile()


def _read(run: Sequence[Use], nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """(reader, what it reads) of one run."""
    names: list[Any] = [use.name[0] if isinstance(use.name, tuple) else use.name for use in run]
    return [(nodes[use.place], name) for use, name in zip(run, names, strict=True)]


def _issued(
    reads: Sequence[tuple[fx.Node, fx.Node]], like: dict[fx.Node, torch.Tensor], before: fx.Node
) -> dict[fx.Node, fx.Node]:
    """Copies of what is read, by the value they copy."""
    return {
        node: _call(before, AHEAD, node, like[node])
        for node in dict.fromkeys(node for _, node in reads)
    }


def _call(before: fx.Node, target: Any, source: fx.Node, value: torch.Tensor) -> fx.Node:
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, (source,))
    node.meta = {k: before.meta[k] for k in ("phase", "module") if k in before.meta}
    node.meta |= {"val": value, "made_by": "upload_parameters"}
    return node
