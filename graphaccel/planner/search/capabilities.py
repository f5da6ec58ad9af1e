"""Checks pins against what the devices support, and lists what may be offloaded to the host."""

from __future__ import annotations

from dataclasses import replace

from graphaccel.errors import BadPin
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.offload import LEAVING, offload_text, read_offload
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.candidates import layouts, meshes_of
from graphaccel.planner.search.solve import Problem


def offered(pins: Pins, problem: Problem, batch: int) -> tuple[tuple[str, ...], ...]:
    """The offload choices, tried one after another until something fits: nothing first, then those
    with the fewest copies. () alone where `offload` is pinned or the host is not known. Optimizer
    state is offered only where the optimizer can work on shards (`Problem.shardable`); others have
    to be pinned. Parameters are offered only where the other pins leave a candidate for it."""
    if pins.offload is not None or problem.cluster.host is None:
        return ((),)
    state = bool(problem.optimizer_bytes) and problem.shardable
    saved = pins.schedule != "zero_bubble"
    # Pins that candidates do not check: they are not compatible with offloaded parameters.
    gathers = pins.reshard_after_forward in (None, "always") and not pins.cast_once
    both = "optimizer", "activations"
    some = (("optimizer",), state), (("activations",), saved), (both, state and saved)
    gone = [read_offload(kinds) for kinds in LEAVING]
    if not (state and saved and gathers and _left(replace(pins, spared=gone[0]), problem, batch)):
        gone = []
    return ((), *(kinds for kinds, possible in some if possible), *gone)


def _left(pins: Pins, problem: Problem, batch: int) -> bool:
    """Whether there is any candidate."""
    result = (meshes_of(problem, pins, batch, each) for each in layouts(problem, pins, batch))
    return any(next(meshes, None) is not None for meshes in result)


def check_offload(pins: Pins, problem: Problem) -> None:
    """Raises BadPin (GA202) where there is nothing to offload for the pin, or the host is not
    known."""
    if not pins.offload:
        return
    reason = None
    if problem.cluster.host is None:
        reason = "the description of the cluster has no host, with its memory and links"
    elif "optimizer" in pins.offload and not problem.optimizer_bytes:
        reason = "there is no optimizer state"
    if reason is not None:
        said = offload_text(pins.offload)
        raise BadPin(pin="offload", value=said, reason=reason, allowed=("none",))


def check_matmul_rates(pins: Pins, problem: Problem) -> None:
    """Raises BadPin (GA202) for a precision whose matmuls the devices do not support; the error
    names the precisions that are no slower there than float32."""
    dtype = PRECISIONS[pins.precision or "fp32"].matmul
    device = problem.cluster.device
    if dtype and dtype not in device.peak_flops:
        usual, rates = device.peak_flops["float32"], device.peak_flops
        scaled = problem.profile.step.has_loss  # otherwise there is no loss to scale
        known = (
            name
            for name, p in PRECISIONS.items()
            if not p.matmul and rates.get(p.compute, 0) >= usual and (scaled or not p.scaled)
        )
        reason = f"{device.name} has no matmuls in {dtype}"
        raise BadPin(pin="precision", value=pins.precision, reason=reason, allowed=tuple(known))


def check_chunk(pins: Pins, in_chunks: bool) -> None:
    """Raises BadPin (GA202) where loss_chunk is pinned, and no op processes rows in chunks."""
    if pins.loss_chunk is None or in_chunks:
        return
    reason = "the graph has no fused head and loss"
    reason += ", which fusions= asks for" if not pins.fusions else ": graphaccel explain says why"
    raise BadPin(pin="loss_chunk", value=pins.loss_chunk, reason=reason)


def planned_notes(plan: Plan) -> tuple[str, ...]:
    """Notes of a report on what is planned but can not be run."""
    notes = []
    if plan.precision.planned_only:
        notes.append(
            "matmuls in 8 bits are planned, not run: optimize() refuses them; memory is counted "
            "as with precision=bf16-params, without copies in 8 bits"
        )
    return tuple(notes)
