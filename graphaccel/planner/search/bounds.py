"""Lower bounds on seconds and bytes of candidates, for many candidates at once.

A bound is the work of the graph that a device runs, spread evenly over the pipeline, with its
collectives; plus the gradients, parameters and optimizer state that must move; without messages,
and without recomputation. While a layout's graph is not built yet, its bound is derived from a
layout with fewer axes (`Layout.parent`): everything is divided further except the launches of ops,
and parameters are divided by the axes that shard them; at best another axis divides what
collectives send.

A large problem has a hundred thousand candidates, so bounds are computed on columns of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np

from graphaccel.errors import BadPin
from graphaccel.planner.estimate.optimizer_time import least_optimizer
from graphaccel.planner.plan.axis_orders import orders, usual_inside
from graphaccel.planner.plan.pins import RESHARDS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.profile.candidate_cuts import candidate_cuts
from graphaccel.planner.profile.efficiency import computing
from graphaccel.planner.profile.microbatch_profile import SizedProfile
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.candidate_columns import Columns, even_idle, least_idle
from graphaccel.planner.search.candidates import Layout
from graphaccel.planner.search.data_axis_bounds import LeastMoved, least_moved
from graphaccel.planner.search.recompute import least_saved
from graphaccel.planner.search.selective_recompute import ways_of
from graphaccel.planner.search.solve import Problem, resident_parts

T = TypeVar("T")


@dataclass(frozen=True)
class Sums:
    """Sums over all stages for one microbatch: seconds (launches: time to start ops, of which
    forward_launches in the forward; casts: of parameters, in one phase; held_casts: the casts that
    can be done once a step); bytes of parameters, of what is saved without recomputation (kept) and
    at least, with recomputation (lean); the most that live within a phase, and the least that a cut
    sends. Numbers, or columns of them."""

    work: Any
    launches: Any
    forward_launches: Any
    backward: Any
    weight: Any
    casts: Any
    held_casts: Any
    held: Any
    trained: Any
    lean: Any
    kept: Any
    passing: Any
    crossing: Any
    largest: Any


class Bounds:
    """Lower bounds on seconds and bytes for the candidates of one problem."""

    def __init__(self, problem: Problem, base: Plan, cached: dict[Any, Any] | None = None) -> None:
        """alike: cache of what does not depend on what is offloaded, shared with other searches."""
        self._alike = {} if cached is None else cached
        self._problem, self._base = problem, base
        self._refused: set[Layout] = set()
        self._built: set[Layout] = set()
        self._near: dict[Layout, Layout] = {}
        self._count = 0  # of profiles when `_near` was computed: other searches build some, too
        self._known: dict[Any, Any] = {}

    @property
    def problem(self) -> Problem:
        """The problem to plan."""
        return self._problem

    @property
    def batch(self) -> int:
        """Examples in the global batch."""
        return self._base.batch

    @property
    def offload(self) -> tuple[str, ...]:
        """What the plans offload to the host."""
        return self._base.offload

    @property
    def gathered(self) -> float:
        """Bytes that ZeRO 3 gathers for each byte of a parameter that it frees."""
        return 0.5 if self._base.precision.stream != "float32" else 1.0

    @property
    def _casts_once(self) -> bool:
        """Whether casts of parameters can be held for all microbatches."""
        free = self._base.cast_once or "cast_once" not in self._base.pinned
        return free and self._base.precision.compute != "float32"

    def build(self, layout: Layout) -> bool:
        """Build the sharded graph of a layout, unless it exists; False where the layout is not
        possible."""
        if layout in self._refused:
            return False
        try:
            self._problem.layouts.of(self._stands(layout))
        except BadPin:
            self._refused.add(layout)
            return False
        return True

    def built(self, layout: Layout) -> bool:
        """Whether the graph of a layout is built."""
        if layout not in self._built and layout not in self._refused:
            if not self._problem.layouts.known(self._stands(layout)):
                return False
            self._built.add(layout)
        return layout in self._built

    def nearest(self, layout: Layout) -> Layout:
        """The layout itself or, of its parents, the nearest whose graph is built."""
        if self._count != self._problem.layouts.count:
            self._near.clear()
            self._count = self._problem.layouts.count
        if layout not in self._near:
            known = layout
            while not self.built(known):
                known = known.parent
            self._near[layout] = known
        return self._near[layout]

    def _stands(self, layout: Layout) -> Plan:
        return replace(self._base, **vars(layout), data=1, microbatches=1)

    def seconds(self, of: Columns, *, even: bool = False, more: Any = 0.0) -> np.ndarray:
        """Lower bounds in seconds, by axes, microbatches and ZeRO. even: for equally long stages,
        as most are; uneven stages may beat this by a part of the pipeline bubble. more: seconds
        that a microbatch takes longer, all stages together."""
        known, sums = self.nearest(of.layout), self.sums(of)
        extra = of.layout.model_parallel_size // known.model_parallel_size
        low = (of.zero == 3) & (RESHARDS.index("never") != of.reshard) & (self.gathered < 1)
        casts = np.where(low, sums.casts * (1 - 1 / of.over), 0.0)
        if self._casts_once:  # casts may be held
            held = (of.microbatches > 1) & ~((of.zero == 3) & (of.data > 1))
            casts = np.where(held, sums.held_casts, casts)

        def divided(phase: np.ndarray, launches: np.ndarray) -> np.ndarray:
            return launches + np.maximum(phase - casts - launches, 0.0) / extra

        starts = sums.forward_launches
        forward = divided(sums.work - sums.backward, starts)
        backward = divided(sums.backward, sums.launches - starts) + more
        work = forward + backward
        each = work / of.pipeline
        idle = (even_idle if even else least_idle)(of, work, sums.weight)
        if self._problem.cluster.device.crowd > 1:
            idle = np.zeros_like(idle)
        moving, late = self._outside(known, of)
        # Recomputing blocks hides no more than it costs.
        moved = moving.exposed(of, forward, backward)
        whole = of.microbatches * each + np.maximum(idle, moved)
        return np.maximum(whole, of.microbatches * sums.largest / extra) + late

    def too_big(self, of: Columns) -> np.ndarray:
        """Whether what the fullest device holds throughout the step is already too much, however
        much is recomputed; reduced by what a layout divides further, while its graph is not built.
        """
        sums = self.sums(of)
        lean = 0 if "activations" in self.offload else sums.lean
        known = self.nearest(of.layout)
        each = self.resident(of) / over_parameters(of.layout, known)
        each = (
            each + lean * known.model_parallel_size / of.layout.model_parallel_size
        ) / of.pipeline
        return each > self._problem.cluster.tensor_budget

    def resident(self, of: Columns) -> np.ndarray:
        """Bytes of parameters, gradients and optimizer state of all stages together."""
        sums = self.sums(of)
        state = self._problem.optimizer_bytes
        parameter, gradient, optimizer = resident_parts(
            of.over, of.zero, of.once, of.held, state, self.gathered, self.offload
        )
        kept = (of.microbatches > 1) | ((of.data > 1) & (of.zero < 2))
        return (
            sums.held * parameter
            + sums.trained * optimizer
            + np.where(kept, sums.trained * gradient, 0)
        )

    def sums(self, of: Columns) -> Sums:
        """The sums of each shape's microbatch, on the nearest layout whose graph is built."""
        known = self.nearest(of.layout)
        sizes, place = of.sizes
        return _spread([self.cached(_sums, known, size, of.ends) for size in sizes], place)

    def _outside(self, known: Layout, of: Columns) -> tuple[LeastMoved, np.ndarray]:
        kinds, place = of.over_data
        asked = [(known, of.layout, *kind) for kind in kinds]
        late = np.array([self._once(_late, *key) for key in asked])
        return _spread([self.cached(_moving, *key) for key in asked], place), late[place]

    def cached(self, make: Callable[..., T], *key: Any) -> T:
        """The result of `make` for these bounds and a key, cached; it must not depend on what is
        offloaded."""
        return _computed(self._alike, self, make, key)

    def _once(self, make: Callable[..., T], *key: Any) -> T:
        return _computed(self._known, self, make, key)

    def plan(self, layout: Layout, **decided: Any) -> Plan:
        """A plan of this problem on a layout."""
        return replace(self._base, **vars(layout), **decided)


def _computed(known: dict[Any, Any], bounds: Bounds, make: Callable[..., T], key: Any) -> T:
    asked = make, *key
    if asked not in known:
        known[asked] = make(bounds, *key)
    return cast(T, known[asked])


def over_parameters(layout: Layout, known: Layout) -> int:
    """The number of parts into which a layout at best divides each parameter of its parent `known`;
    the context axis divides none."""
    return layout.tensor * layout.expert // (known.tensor * known.expert)


def _least(result: Sequence[LeastMoved]) -> LeastMoved:
    """The minimum of each field."""
    names = [field.name for field in fields(LeastMoved)]
    return LeastMoved(**{name: min(getattr(one, name) for one in result) for name in names})


def _spread(result: Sequence[T], place: np.ndarray) -> T:
    """One instance with columns, from several with numbers. place: which of them each row takes."""
    names = [field.name for field in fields(cast(Any, result[0]))]
    return replace(
        cast(Any, result[0]),
        **{name: np.array([getattr(one, name) for one in result])[place] for name in names},
    )


def recompute_curve(bounds: Bounds, known: Layout, small: int) -> tuple[np.ndarray, np.ndarray]:
    """(shares of the saved bytes that recomputation can free, ascending from 0 to 1; share of the
    forward that is recomputed for it), the cheapest first, for one microbatch size."""
    profile, sized = bounds.cached(sized_profile, known, small)
    steps: list[tuple[float, float, float]] = []  # seconds per byte, bytes, seconds
    for kind, ways in zip(profile.block_kinds, ways_of(profile, sized), strict=True):
        ends = [(0, 0.0), *((way.less, way.seconds) for way in ways)]
        for (less, before), (more, after) in pairwise(ends):
            count, saved = len(kind.blocks), more - less
            steps.append(((after - before) / saved, count * saved, count * (after - before)))
    steps.sort()
    saved = np.cumsum([0.0, *(step[1] for step in steps)])
    seconds = np.cumsum([0.0, *(step[2] for step in steps)])
    forward = sized.work - float(sized.backward.sum())
    if not saved[-1]:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    return saved / saved[-1], seconds / forward


def sized_profile(bounds: Bounds, known: Layout, small: int) -> tuple[Profile, SizedProfile]:
    """The profile of a layout, and at one microbatch size."""
    plan = bounds.plan(known, data=1, microbatches=1, batch=small)
    profile = bounds.problem.layouts.of(plan)
    if usual_inside(plan):
        return profile, bounds.problem.sized(plan)
    # The stride of the collectives depends on the other axes: they are counted as free.
    device = computing(bounds.problem.cluster.device, plan.precision)
    return profile, profile.sized(plan.microbatch_size, device, None, plan.loss_chunk)


def _lean(bounds: Bounds, known: Layout, small: int) -> int:
    return least_saved(*sized_profile(bounds, known, small))


def _least_lean(bounds: Bounds, known: Layout, small: int, ends: tuple[int, int]) -> int:
    """`least_saved` at one size, or a little less: for a size between two others it is at least
    their linear interpolation. It is a minimum of many sums of bytes, and the minimum of linear
    sums is concave."""
    low, high = ends
    asked = [bounds.cached(sized_profile, known, size) for size in (low, small, high)]
    if small in ends or len({id(profile) for profile, _ in asked}) > 1:
        return bounds.cached(_lean, known, small)
    each = [sized.bytes for _, sized in asked]
    between = each[0] * (high - small) + each[2] * (small - low)
    if (each[1] * (high - low) < between).any():
        return bounds.cached(_lean, known, small)
    least, most = (bounds.cached(_lean, known, size) for size in ends)
    return (least * (high - small) + most * (small - low)) // (high - low)


def _sums(bounds: Bounds, known: Layout, small: int, ends: tuple[int, int]) -> Sums:
    profile, sized = bounds.cached(sized_profile, known, small)
    lean = _least_lean(bounds, known, small, ends)
    cuts = candidate_cuts(profile, sized).bytes
    return Sums(
        sized.work,
        sized.launches,
        sized.forward_launches,
        float(sized.backward.sum()),
        float(sized.weight.sum()),
        float(sized.casts.sum()),
        float(sized.held_casts.sum()),
        profile.held_bytes,
        profile.trained_bytes,
        lean,
        int(sized.saved(profile.no_recomputation)[0].sum()),
        int(max(sized.passing_forward.max(), sized.passing_backward.max())),
        min(cuts, default=0),
        longest_position(sized),
    )


def most_stages(bounds: Bounds, known: Layout, small: int) -> int:
    """The number of stages that the graph of a layout can be cut into at most."""
    return len(candidate_cuts(*bounds.cached(sized_profile, known, small)).positions) + 1


def longest_position(sized: SizedProfile) -> float:
    """Seconds of the position that takes longest, without casts, which may run elsewhere."""
    casts = 2 * np.maximum(sized.casts, sized.held_casts)
    return float(max(0.0, (sized.forward + sized.backward - casts).max(initial=0.0)))


def _moving(
    bounds: Bounds, known: Layout, layout: Layout, data: int, pipeline: int, zero: int, over: int
) -> LeastMoved:
    """Lower bound on the traffic over data, in any candidate order of the axes."""
    problem, extra = bounds.problem, over_parameters(layout, known)
    profile, plan = _between(bounds, known, layout, data, pipeline, zero, over)
    ways = [replace(plan, order=order) for order in orders(problem.cluster, plan)]
    return _least([least_moved(profile, one, problem.cluster, extra) for one in ways])


def _late(
    bounds: Bounds, known: Layout, layout: Layout, data: int, pipeline: int, zero: int, over: int
) -> float:
    """Lower bound on the seconds of the optimizer's step."""
    problem, extra = bounds.problem, over_parameters(layout, known)
    profile, plan = _between(bounds, known, layout, data, pipeline, zero, over)
    return least_optimizer(profile, plan, problem.cluster, problem.optimizer_bytes, extra)


def _between(
    bounds: Bounds, known: Layout, layout: Layout, data: int, pipeline: int, zero: int, over: int
) -> tuple[Profile, Plan]:
    """The profile that represents such plans, and one of these plans."""
    shard = over if over < data else 0
    plan = bounds.plan(layout, data=data, pipeline=pipeline, zero=zero, shard_size=shard)
    return bounds.cached(_profile, known), plan


def _profile(bounds: Bounds, known: Layout) -> Profile:
    return bounds.problem.layouts.of(bounds.plan(known, data=1, microbatches=1))
