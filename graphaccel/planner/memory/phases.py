"""Peak tensor bytes of a rank in each phase of a training: load, steps, save.

    load     what this rank holds, and one full parameter at a time of the sharded ones
             (`runtime.session.Session.settle`); for a model that was built with weights all of
             it, then what this rank holds beside the full parameters of which it keeps a part
    step     what is held after the backward, optimizer state, and the temporaries of the step
             (`planner.estimate.optimizer_memory`)
    save     the same without the temporaries: shards are written as they are. `full_state_dict`
             gathers one parameter at a time, its shards and then the full one, and returns all of
             them on the host (`runtime.parameters.state.full_state`)

The first forward and backward have no optimizer state yet. Where the device is the host's own
processor, what is built or gathered in full is in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphaccel.ir.program import StageProgram
from graphaccel.planner.plan.prediction import Phases

if TYPE_CHECKING:
    from graphaccel.planner.memory.resident import Resident

LOAD, STEP = "loading the model", "the optimizer's step"


@dataclass(frozen=True)
class Seen:
    """Bytes counted in a walk through a rank's step. held, optimizer: parameters and optimizer
    state that the rank holds throughout. forward, backward, peak: the peak of everything else, in
    each and in both; left: the part of it that is still held when the optimizer steps."""

    held: int
    optimizer: int
    forward: int
    backward: int
    peak: int
    left: int


def phases_of(own: Sequence[StageProgram], resident: Resident, seen: Seen) -> Phases:
    """The phases of a rank with the stages `own`."""
    names = sorted({n for p in own for n in p.parameters})
    rest, whole = resident.parameters, {**resident.parameters, **resident.whole}
    shared = [n for n in names if rest[n] < whole[n]]
    largest = max((whole[n] for n in shared), default=0)
    here = seen.held + sum(whole[n] - rest[n] for n in names)
    biggest = max(whole.values(), default=0)
    sent = biggest if here < resident.built else 0  # parameters of another pipeline rank
    kept = seen.held + seen.optimizer + seen.left
    given = 0 if resident.exchanged else resident.built
    return Phases(
        load=seen.held + largest + resident.batch,
        load_built=max(resident.built, here + sum(rest[n] for n in shared)) + resident.batch,
        forward=seen.held + seen.forward,
        backward=seen.held + seen.backward,
        step=kept + resident.step(names),
        later=seen.held + seen.optimizer + seen.peak,
        save=kept,
        save_whole=kept + max(2 * largest, sent) + resident.built - given,
        host_load=0 if resident.exchanged else biggest,
        host_load_built=given,
        host_save_whole=0 if resident.exchanged else given + biggest,
    )
