"""Bytes of parameters under ZeRO: those that no dim allows to shard, replicated, and padding.

A parameter of which the ranks can split no dim is replicated (`planner.plan.zero`): neither
gathered nor scattered, its gradients are all-reduced as in data parallelism. One whose dim they do
not divide is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.zero import data_dim, even_dim
from graphaccel.planner.profile.profile import Profile


@dataclass(frozen=True)
class Kept:
    """Bytes of replicated parameters where ZeRO shards the others (held), and of the trained ones
    among them (trained); by how many bytes the shards of all ranks together are larger than the
    sharded parameters (padding), and for the trained ones alone (padding_trained); bytes of the
    trained parameters that are padded (padded_trained)."""

    held: int = 0
    trained: int = 0
    padding: int = 0
    padding_trained: int = 0
    padded_trained: int = 0


def kept_whole(profile: Profile, plan: Plan) -> frozenset[str]:
    """Names of the parameters that are not sharded."""
    return frozenset() if plan.shards == 1 else _cut(profile, plan)[0]


def padding_bytes(profile: Profile, plan: Plan) -> Mapping[str, int]:
    """By how many bytes the shards of all ranks are larger than a parameter, for those that are
    padded."""
    return {} if plan.shards == 1 else _cut(profile, plan)[1]


def _cut(profile: Profile, plan: Plan) -> tuple[frozenset[str], Mapping[str, int]]:
    """(names of the parameters that stay whole, bytes of padding of those that are padded)."""
    return profile.analyses.cached(plan.shards, _cut_by, profile, plan)


def _cut_by(profile: Profile, plan: Plan) -> tuple[frozenset[str], Mapping[str, int]]:
    ranks = plan.shards
    whole, padding = set(), {}
    for shape, names in profile.analyses.cached((), _shapes, profile).items():
        dim = data_dim(shape, (), plan, ranks)
        if dim is None:
            whole |= set(names)
        elif behind := -shape[dim] % ranks:
            padding |= {name: size * behind // shape[dim] for name, size in names.items()}
    return frozenset(whole), padding


def perhaps_kept(profile: Profile, ranks: int) -> int:
    """Upper bound on the bytes of trained parameters that stay replicated where ZeRO and further
    sharding axes together have `ranks` ranks: all parameters without a dim that these divide. Dims
    that other axes split are not padded."""
    return profile.analyses.cached(ranks, _perhaps_kept, profile, ranks)


def _perhaps_kept(profile: Profile, ranks: int) -> int:
    trained = (p for p in profile.parameters if p.trainable)
    return sum(p.bytes for p in trained if even_dim(p.shape, ranks) is None)


def kept_bytes(profile: Profile, plan: Plan, spans: Sequence[tuple[int, int]]) -> Kept:
    """The bytes for positions [first, end) of `spans`; zero where ZeRO shards nothing."""
    if not plan.zero or plan.data == 1:
        return Kept()
    names, padding = kept_whole(profile, plan), padding_bytes(profile, plan)
    if not (names or padding):
        return Kept()
    request = plan.shards, tuple(spans)
    return profile.analyses.cached(request, _kept_bytes, profile, names, padding, spans)


def _kept_bytes(
    profile: Profile,
    names: frozenset[str],
    padding: Mapping[str, int],
    spans: Sequence[tuple[int, int]],
) -> Kept:
    read = [profile.parameters[n] for n in profile.read(spans)]
    kept = [p for p in read if p.name in names]
    padded = [p for p in read if p.name in padding]
    trained = [p for p in padded if p.trainable]
    return Kept(
        sum(p.bytes for p in kept),
        sum(p.bytes for p in kept if p.trainable),
        sum(padding[p.name] for p in padded),
        sum(padding[p.name] for p in trained),
        sum(p.bytes for p in trained),
    )


def share_bytes(size: int, kept: int, padding: int, plan: Plan) -> int:
    """A rank's bytes of `size` bytes of parameters, of which `kept` are replicated. padding: of all
    ranks."""
    return kept + (size - kept + padding) // plan.shards


def _shapes(profile: Profile) -> dict[tuple[int, ...], dict[str, int]]:
    """The names of the parameters of each shape, with their bytes."""
    results: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for parameter in profile.parameters:
        if parameter.name in profile.parameter_names:
            results[parameter.shape][parameter.name] = parameter.bytes
    return dict(results)
