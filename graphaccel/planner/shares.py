"""What a rank keeps of the parameters that ZeRO shares out: those that it can not divide, whole.

A parameter none of whose dims the ranks divide rests whole on each (`planner.zero`): neither
gathered nor scattered, its gradients are summed like those of data parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from graphaccel.planner.plan import Plan
from graphaccel.planner.profile import Profile
from graphaccel.planner.zero import data_dim


@dataclass(frozen=True)
class Kept:
    """Bytes of parameters that lie whole on a rank where ZeRO shares the others, and of those among
    them that are trained."""

    held: int = 0
    trained: int = 0


def kept_whole(profile: Profile, plan: Plan, ranks: int | None = None) -> frozenset[str]:
    """Names of the parameters that stay whole. ranks: that share them, where not the plan's."""
    ranks = plan.shards if ranks is None else ranks
    if ranks == 1:
        return frozenset()

    def found() -> frozenset[str]:
        shapes = profile.once("shapes", lambda: _shapes(profile))
        whole = (
            names for shape, names in shapes.items() if data_dim(shape, (), plan, ranks) is None
        )
        return frozenset(name for names in whole for name in names)

    return profile.once(("kept whole", ranks), found)


def kept_trained(profile: Profile, plan: Plan, ranks: int) -> int:
    """Bytes of those that are trained."""
    names = kept_whole(profile, plan, ranks)
    return profile.once(
        ("kept trained", ranks),
        lambda: sum(p.bytes for p in profile.parameters if p.trainable and p.name in names),
    )


def kept_bytes(profile: Profile, plan: Plan, spans: Sequence[tuple[int, int]]) -> Kept:
    """Of positions [first, end) of `spans`; none where ZeRO shares nothing."""
    if not plan.zero or plan.data == 1:
        return Kept()
    names = kept_whole(profile, plan)
    if not names:
        return Kept()

    def found() -> Kept:
        read = map(profile.parameters.__getitem__, profile.read(spans))
        kept = [p for p in read if p.name in names]
        return Kept(sum(p.bytes for p in kept), sum(p.bytes for p in kept if p.trainable))

    return profile.once(("kept bytes", plan.shards, tuple(spans)), found)


def share_bytes(size: int, kept: int, plan: Plan) -> int:
    """Of so many bytes, of which some are kept whole, those of a rank."""
    return kept + (size - kept) // plan.shards


def _shapes(profile: Profile) -> dict[tuple[int, ...], list[str]]:
    """The names of the parameters of each shape."""
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for parameter in profile.parameters:
        if parameter.name in profile.resting:
            found[parameter.shape].append(parameter.name)
    return dict(found)
