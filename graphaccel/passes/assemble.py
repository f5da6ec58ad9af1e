"""Assemble the results of all passes into the program of a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphaccel.compat.torch.graphs import boxed
from graphaccel.ir.calls import draws_by_shape
from graphaccel.ir.program import StageProgram, StepProgram, Value
from graphaccel.passes.context import Context
from graphaccel.sharding.rules.batch_placement import PARTIAL


def assembled(context: Context) -> StepProgram:
    """The program that runs: one program a stage, and the facts that hold for all of them."""
    step, axes, programs = context.step, context.rank, context.programs
    parameter_shards = dict(axes.parameter_shards)
    for name, own in context.owned.items():
        if own.level == 3:
            parameter_shards[name] = (*parameter_shards.get(name, ()), own.split)
    prologue = context.part.prologue
    places = list(zip(step.outputs, context.part.output_places, strict=True))
    loss = [place == PARTIAL for spec, place in places if spec.kind == "loss"]
    outside = context.gradients and not step.has_loss
    return StepProgram(
        stages=tuple(boxed_program(p) for p in programs),
        prologue=None if prologue is None else replace(prologue, graph=boxed(prologue.graph)),
        forward_edges=_edges([(p.stage, p.forward_inputs) for p in programs]),
        backward_edges=_edges([(p.stage, p.backward_inputs) for p in programs]),
        loss_partial=bool(loss and loss[0]),
        shared=context.shared,
        output_places={s.leaf: place for s, place in places if s.kind == "output"},
        random=context.random,
        shared_draws=prologue is not None and any(map(draws_by_shape, prologue.graph.graph.nodes)),
        parameter_shards=parameter_shards,
        partial=axes.partial,
        input_places={s.leaf: place for s, place in places if s.kind == "input_gradient"},
        data=context.plan.data,
        bare=context.unsummed[0] if outside else None,
        owned=context.owned,
        unsharded=context.unsharded,
        ort=context.report,
    )


def boxed_program(program: StageProgram) -> StageProgram:
    """The program with graphs that take their inputs as one list and empty it."""
    return replace(
        program,
        forward=boxed(program.forward),
        backwards={moment: boxed(graph) for moment, graph in program.backwards.items()},
        weights={moment: boxed(graph) for moment, graph in program.weights.items()},
        prepare=None if program.prepare is None else boxed(program.prepare),
        head=None if program.head is None else boxed(program.head),
    )


def _edges(inputs: Sequence[tuple[int, Sequence[Value]]]) -> frozenset[tuple[int, int]]:
    """(source, destination) of every value that a stage receives."""
    return frozenset(
        (value.peers[0], stage)
        for stage, values in inputs
        for value in values
        if value.kind == "received"
    )
