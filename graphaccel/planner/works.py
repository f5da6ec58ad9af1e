"""What each stage of a plan holds and does, from the profile of its graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphaccel.planner.cluster import Cluster
from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Parameter, Profile, SizedProfile
from graphaccel.planner.stages import stage_positions
from graphaccel.planner.wires import wires_of
from graphaccel.schedule.table import build
from graphaccel.schedule.validate import in_flight, occupancy

# Starting a stage's graph for one microbatch costs as much host time as starting some ops.
_LAUNCHES_AN_ACTION = 10


def sized_for(profile: Profile, plan: Plan, cluster: Cluster) -> SizedProfile:
    """The profile at the plan's microbatch size and precision, on the plan's mesh."""
    wires = wires_of(cluster, plan) if plan.replica > 1 else None
    return profile.sized(plan.microbatch_size, cluster.device, plan.precision.compute, wires)


@dataclass(frozen=True)
class StageWork:
    """One stage of a plan: positions [first, end), seconds a microbatch, bytes of its parameters.

    weight: seconds of the backward that a schedule can have apart. action: seconds that starting
    one of them takes. sent_forward, sent_backward:
    seconds of collectives inside forward and backward. held: bytes of parameters
    and buffers. gradient: bytes of gradients; partial: of those among them that are partial sums,
    by the axes besides data. tensors: trained tensors.
    """

    first: int
    end: int
    forward: float
    backward: float
    held: int
    gradient: int
    tensors: int
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    partial: tuple[tuple[tuple[str, ...], int], ...] = ()
    weight: float = 0.0
    action: float = 0.0

    @property
    def summed(self) -> dict[tuple[str, ...], int]:
        """Bytes of gradients by the axes besides data over which they are still to be summed."""
        found = dict(self.partial)
        return {(): self.gradient - sum(found.values()), **found}

    def shorter(self, factor: float) -> StageWork:
        """The same in so much less time."""
        names = ("forward", "backward", "weight", "action", "sent_forward", "sent_backward")
        return replace(self, **{name: getattr(self, name) / factor for name in names})

    @property
    def alone(self) -> StageWork:
        """The same with collectives that take no time."""
        return replace(
            self,
            forward=self.forward - self.sent_forward,
            backward=self.backward - self.sent_backward,
            sent_forward=0.0,
            sent_backward=0.0,
        )


def stage_works(
    profile: Profile, sized: SizedProfile, plan: Plan, launch_seconds: float
) -> tuple[StageWork, ...]:
    """What each stage of `plan` holds and does. Raises ValueError for cuts that do not fit the
    graph.
    """
    numbers = {name: i for i, name in enumerate(profile.block_names)}
    again = np.isin(profile.block_at, [numbers[name] for name in plan.recompute])

    def remade(own: np.ndarray, forward: np.ndarray) -> np.ndarray:
        return own + np.where(again, forward, 0.0)

    backward = remade(sized.backward, sized.forward)
    sent = remade(sized.sent_backward, sized.sent_forward)
    host = remade(sized.host_backward, sized.host_forward)
    action = _LAUNCHES_AN_ACTION * launch_seconds
    works = []
    for first, end in stage_positions(profile, plan.cuts):
        held = held_parameters(profile, [(first, end)])
        trained = [p for p in held if p.trainable]
        partial: dict[tuple[str, ...], int] = defaultdict(int)
        for parameter in trained:
            if parameter.name in profile.partial:
                partial[profile.partial[parameter.name]] += parameter.bytes
        here = slice(first, end)
        ahead = _phase(sized.forward, sized.sent_forward, sized.host_forward, here)
        back = _phase(backward, sent, host, here)
        works.append(
            StageWork(
                first=first,
                end=end,
                forward=action + ahead[0],
                backward=action + back[0],
                held=sum(p.bytes for p in held),
                gradient=sum(p.bytes for p in trained),
                tensors=len(trained),
                sent_forward=ahead[1],
                sent_backward=back[1],
                partial=tuple(sorted(partial.items())),
                weight=float(sized.weight[first:end].sum()),
                action=action,
            )
        )
    return tuple(works)


def _phase(
    device: np.ndarray, sent: np.ndarray, host: np.ndarray, here: slice
) -> tuple[float, float]:
    """(seconds, those that collectives add) of a stage's phase: device and process work side by
    side, so that the slower decides."""
    busy, waiting, starting = (float(values[here].sum()) for values in (device, sent, host))
    whole = max(busy, starting)
    return whole, whole - max(busy - waiting, starting)


def held_parameters(profile: Profile, spans: Sequence[tuple[int, int]]) -> tuple[Parameter, ...]:
    """Parameters and buffers that positions [first, end) of `spans` read; unused ones lie on stage
    0.
    """

    def here(parameter: Parameter) -> bool:
        places = parameter.positions or (0,)
        return any(first <= p < end for p in places for first, end in spans)

    return tuple(parameter for parameter in profile.parameters if here(parameter))


def flight(plan: Plan) -> dict[int, int]:
    """Stage → the most microbatches it holds at a time."""
    if plan.schedule == "1f1b":
        return {s: min(plan.microbatches, plan.stages - s) for s in range(plan.stages)}
    if plan.schedule == "gpipe":
        return dict.fromkeys(range(plan.stages), plan.microbatches)
    return in_flight(build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches))


def held_together(plan: Plan, bytes_of: Sequence[int]) -> dict[int, int]:
    """Stage → microbatches it holds while its rank holds the most bytes of them. bytes_of: what a
    stage saves of one microbatch.

    The stages of a rank are full at different times.
    """
    if plan.interleave == 1:
        return flight(plan)
    found: dict[int, int] = {}
    for moments in occupancy(
        build(plan.schedule, plan.pipeline, plan.interleave, plan.microbatches)
    ):
        totals = [sum(n * bytes_of[s] for s, n in moment.held.items()) for moment in moments]
        found |= moments[totals.index(max(totals))].held
    return found
