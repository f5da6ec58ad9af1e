"""What a problem's devices can do of what is pinned; what may be kept on their host."""

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
    """What is tried one after another until something fits: nothing first, and of the rest what
    copies least. () alone where `offload` is pinned or the host is not known. Optimizers that may
    need more than a step on the host have to be asked for. Parameters leave where other pins let
    some candidate have them there."""
    if pins.offload is not None or problem.cluster.host is None:
        return ((),)
    state = bool(problem.optimizer_bytes) and problem.shardable
    saved = pins.schedule != "zero_bubble"
    # What candidates do not look at: with parameters there, other pins can not be had.
    again = pins.reshard_after_forward in (None, "always") and not pins.cast_once
    both = "optimizer", "activations"
    some = (("optimizer",), state), (("activations",), saved), (both, state and saved)
    gone = [read_offload(kinds) for kinds in LEAVING]
    if not (state and saved and again and _left(replace(pins, spared=gone[0]), problem, batch)):
        gone = []
    return ((), *(kinds for kinds, possible in some if possible), *gone)


def _left(pins: Pins, problem: Problem, batch: int) -> bool:
    """Whether there is a candidate at all."""
    found = (meshes_of(problem, pins, batch, each) for each in layouts(problem, pins, batch))
    return any(next(meshes, None) is not None for meshes in found)


def check_offload(pins: Pins, problem: Problem) -> None:
    """Raises BadPin (GA202) where what is pinned to the host is not there, or the host is not."""
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


def check_products(pins: Pins, problem: Problem) -> None:
    """Raises BadPin (GA202) for a precision whose products the devices do not have; it names those
    that are no slower there than float32."""
    dtype = PRECISIONS[pins.precision or "fp32"].products
    device = problem.cluster.device
    if dtype and dtype not in device.peak_flops:
        usual, rates = device.peak_flops["float32"], device.peak_flops
        scaled = problem.profile.step.has_loss  # otherwise there is no loss to scale
        known = (
            name
            for name, p in PRECISIONS.items()
            if not p.products and rates.get(p.compute, 0) >= usual and (scaled or not p.scaled)
        )
        reason = f"{device.name} has no products in {dtype}"
        raise BadPin(pin="precision", value=pins.precision, reason=reason, allowed=tuple(known))


def check_chunk(pins: Pins, in_chunks: bool) -> None:
    """Raises BadPin (GA202) where rows at a time are pinned, and nothing goes over rows so."""
    if pins.loss_chunk is None or in_chunks:
        return
    reason = "the graph has no fused head and loss"
    reason += ", which fusions= asks for" if not pins.fusions else ": graphaccel explain says why"
    raise BadPin(pin="loss_chunk", value=pins.loss_chunk, reason=reason)


def planned_notes(plan: Plan) -> tuple[str, ...]:
    """What a report says of what is planned and can not be run."""
    notes = []
    if plan.precision.planned_only:
        notes.append(
            "products in 8 bits are planned, not run: optimize() refuses them; memory is counted "
            "as with precision=bf16-params, without copies in 8 bits"
        )
    return tuple(notes)
