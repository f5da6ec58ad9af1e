"""Completes a step's results over ranks: loss, shared gradients, outputs and buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from graphaccel.compat.torch.optimizers import unscale
from graphaccel.ir.program import StepProgram
from graphaccel.ir.values import returned
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.execution.parts import of_microbatches, over_data
from graphaccel.runtime.execution.state import Held, StepResult, StepState
from graphaccel.runtime.loss_scale import LossScale
from graphaccel.runtime.mesh import Mesh
from graphaccel.sharding.rules.batch_placement import sharded_dim


class Results:
    """The results of one rank's steps, completed with those of other ranks.

    unsplit: every data rank runs the whole batch (evaluation). The groups for the program's
    collectives exist (`Mesh.ensure`).
    """

    def __init__(
        self, program: StepProgram, mesh: Mesh, held: Held, microbatches: int, *, unsplit: bool
    ) -> None:
        self._program, self._mesh, self._held = program, mesh, held
        self._microbatches, self._data = microbatches, 1 if unsplit else mesh.data
        self._loss_group = None
        if mesh.pipeline > 1 or self._data > 1:
            self._loss_group = mesh.group("pipeline" if unsplit else "pipeline+data")
        self._reached = program.reached
        self._written = [
            (name, maker, tuple(sorted({s % mesh.pipeline for s in stages})))
            for name, (maker, stages) in sorted(program.written.items())
        ]
        mesh.ensure_shared(places for _, _, places in self._written)

    def start_loss(self, state: StepState) -> None:
        """Start the all-reduce of the whole batch's loss over all ranks, overlapped with the
        backwards."""
        like = next(
            (
                node.meta["val"]
                for stage in self._program.stages  # an earlier one where later layers are skipped
                for graph, values in stage.results
                for node, value in zip(returned(graph), values, strict=True)
                if value.kind == "loss"
            ),
            None,
        )
        if like is None:
            return
        if state.losses:
            partial = self._program.loss_partial
            loss = (
                torch.stack(state.losses).sum()
                if partial and len(state.losses) > 1
                else state.losses[-1]
            )
            if not partial and self._data > 1:
                loss = loss / self._data
        else:
            loss = torch.zeros((), dtype=like.dtype, device=self._mesh.device)
        if self._loss_group is not None:
            loss = loss.clone()
            state.loss_reduction = dist.all_reduce(loss, group=self._loss_group, async_op=True)
        state.loss = loss

    def finish(self, state: StepState) -> StepResult:
        """The results, once the loss and the shared gradients are reduced."""
        gradients = {}
        for name, parts in state.gradients.items():
            total = parts[0]
            for other in parts[1:]:  # stages on one rank that share a parameter
                total.add_(other)
            gradients[name] = total
        self._sum_shared(gradients, state)
        self._broadcast_buffers(state)
        return StepResult(
            self._loss(state),
            gradients,
            self._gathered_outputs(state),
            layouts=self._held.gradients,
        )

    def _broadcast_buffers(self, state: StepState) -> None:
        """Broadcast new values of buffers to every rank that holds them."""
        for name, maker, places in self._written:
            if self._mesh.pipeline_index not in places:
                continue
            own = self._held.buffers.get(name)
            value = state.buffers.get(name)
            if len(places) > 1:
                like = own if value is None else value
                assert like is not None  # a rank in `places` computes the value or holds the buffer
                value = torch.empty_like(like) if value is None else value.contiguous()
                state.awaited = f"the new value of `{name}`", (name,)
                source = self._mesh.rank_of(maker)
                dist.broadcast(value, source, group=self._mesh.shared_groups[places])
            if own is not None and value is not None:
                own.copy_(value)

    def unscaled(self, result: StepResult, scale: LossScale) -> StepResult:
        """Unscale the gradients, and record whether some rank's overflowed."""
        overflow = unscale(list(result.gradients.values()), scale.factor)
        if self._mesh.world > 1:
            with answered("whether the gradients of all ranks are finite"):
                dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self._mesh.world_group)
        scale.record(overflow)
        result.overflow = overflow
        return result

    def _sum_shared(self, gradients: dict[str, torch.Tensor], state: StepState) -> None:
        """All-reduce gradients of parameters that stages of several ranks share, once a step."""
        for name, stages in sorted(self._program.shared.items()):
            places = tuple(sorted({s % self._mesh.pipeline for s in stages}))
            if len(places) > 1 and self._mesh.pipeline_index in places:
                if name not in gradients:
                    if name not in self._reached:  # frozen: no rank has a gradient for it
                        continue
                    gradients[name] = self._zero_gradient(name)
                gradients[name] = gradients[name].contiguous()
                state.awaited = f"the gradient of `{name}`, which several stages use", (name,)
                dist.all_reduce(gradients[name], group=self._mesh.shared_groups[places])

    def _zero_gradient(self, name: str) -> torch.Tensor:
        like = self._held.parameters[name]
        layout = self._held.gradients.get(name)
        shape = like.shape if layout is None else layout.local_shape
        return like.new_zeros(shape, device=self._mesh.device)

    def _loss(self, state: StepState) -> torch.Tensor | None:
        state.awaited = "the loss of all ranks", ()
        if state.loss_reduction is not None:
            state.loss_reduction.wait()
        return state.loss

    def _gathered_outputs(self, state: StepState) -> dict[int, torch.Tensor]:
        """The model's outputs besides the loss: parts concatenated, on every rank."""
        stages = {
            v.leaf: p.stage
            for p in self._program.stages
            for _, values in p.results
            for v in values
            if v.kind == "output"
        }
        gathered = {}
        for leaf, stage in sorted(stages.items()):
            state.awaited = "what the model returns, of all ranks", ()
            place = self._program.output_places[leaf]
            parts = state.outputs.get(leaf, [])
            if len(parts) > 1:
                joined = of_microbatches(parts, place)
            else:
                joined = parts[0] if parts else self._empty_output(stage, leaf, place)
            if self._data > 1 and parts:
                joined = over_data(joined, place, self._mesh)
            if self._mesh.pipeline > 1:
                joined = joined.contiguous()
                dist.broadcast(joined, self._mesh.rank_of(stage), group=self._mesh.pipeline_group)
            gathered[leaf] = joined
        return gathered

    def _empty_output(self, stage: int, leaf: int, place: Any) -> torch.Tensor:
        program = self._program.stages[stage]
        like = next(
            n.meta["val"]
            for graph, values in program.results
            for n, v in zip(returned(graph), values, strict=True)
            if v.kind == "output" and v.leaf == leaf
        )
        shape, at = list(like.shape), sharded_dim(place)
        if at is not None:
            shape[at[0]] *= self._microbatches * self._data
        return torch.empty(shape, dtype=like.dtype, device=self._mesh.device)
