"""Asynchronous sends and receives of tensors between pipeline stages over torch.distributed.

A message is every value that one stage's forward or backward of one microbatch sends to one other
stage, each with a tag of its own. Dense tensors are sent in their memory layout, so that strides
are preserved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from graphaccel.ir.program import StepProgram, Value
from graphaccel.runtime.mesh import Mesh
from graphaccel.schedule.table import Action


class Messages:
    """This rank's messages of one program."""

    def __init__(self, program: StepProgram, mesh: Mesh, microbatches: int) -> None:
        self._program, self._mesh, self._microbatches = program, mesh, microbatches
        self._posted: dict[tuple, list[tuple[str, torch.Tensor, Any]]] = {}
        self._sending: dict[tuple, list[tuple[Any, torch.Tensor]]] = {}

    def post(self, action: Action) -> None:
        """Allocate the buffers of a receive and post it."""
        source = self._mesh.rank_of(action.peer)
        started = []
        for number, (name, like) in enumerate(self._expected(action)):
            flat = torch.empty(like.numel(), dtype=like.dtype, device=self._mesh.device)
            buffer = flat.as_strided(like.shape, like.stride())
            tag = self._tag(action.peer, action.stage, action.microbatch, action.direction, number)
            work = dist.irecv(
                flat, source, group=self._channel(source, self._mesh.rank, action), tag=tag
            )
            started.append((name, buffer, work))
        self._posted[_key(action)] = started

    def wait(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for a receive; returns its tensors by name."""
        received = {}
        for name, buffer, work in self._posted.pop(_key(action)):
            work.wait()
            received[name] = buffer
        return received

    def send(self, action: Action, values: dict[str, torch.Tensor]) -> None:
        """Start sending; the tensors are held until `release`."""
        destination = self._mesh.rank_of(action.peer)
        started = []
        receive = Action("receive", action.peer, action.microbatch, action.stage, action.direction)
        for number, (name, like) in enumerate(self._expected(receive)):
            tensor = values[name]
            if tensor.stride() != like.stride():
                # A kernel's result may have other strides than its fake value; the receiver was
                # compiled for the fake value's layout.
                tensor = torch.empty_strided(
                    like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
            flat = tensor.as_strided((tensor.numel(),), (1,))
            tag = self._tag(action.stage, action.peer, action.microbatch, action.direction, number)
            group = self._channel(self._mesh.rank, destination, action)
            started.append((dist.isend(flat, destination, group=group, tag=tag), flat))
        self._sending[_key(action)] = started

    def release(self, action: Action) -> None:
        """Wait until a send is complete and drop its tensors."""
        for work, _ in self._sending.pop(_key(action)):
            work.wait()

    def _expected(self, action: Action) -> list[tuple[str, torch.Tensor]]:
        """Names and fake values of a receive's tensors, in the order of their names."""
        stage = self._program.stages[action.stage]
        if action.direction == "forward":
            graph, values = stage.forward, stage.forward_inputs
        else:
            graph, values = next(iter(stage.backwards.values())), stage.backward_inputs
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        pairs = [
            (value.name, node.meta["val"])
            for node, value in zip(nodes, values, strict=True)
            if value.kind == "received" and value.peers == (action.peer,)
        ]
        return sorted(pairs, key=lambda pair: pair[0])

    def _tag(
        self, source: int, destination: int, microbatch: int, direction: str, number: int
    ) -> int:
        stages = len(self._program.stages)
        edge = (source * stages + destination) * 2 + (direction == "backward")
        return (edge * self._microbatches + microbatch) * 64 + number

    def _channel(self, source: int, destination: int, action: Action) -> Any:
        key = (source, destination, action.direction)
        return self._mesh.channels.get(key, self._mesh.pipeline_group)


def sent_values(
    values: tuple[Value, ...], outputs: list[Any], peer: int
) -> dict[str, torch.Tensor]:
    """The values among a graph's outputs that one other stage receives."""
    return {
        v.name: o
        for v, o in zip(values, outputs, strict=True)
        if v.kind == "sent" and peer in v.peers
    }


def _key(action: Action) -> tuple:
    return (action.stage, action.peer, action.microbatch, action.direction)
