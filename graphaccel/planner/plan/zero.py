"""ZeRO sharding: the dim of each parameter that is sharded over the data axis or a part of it.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020, §5:
with N data ranks, level 1 keeps 1/N of the optimizer state on each, level 2 of the gradients too,
level 3 of the parameters too. A parameter is split on the first dim that N divides, so that a shard
is a tensor in its own right, with a place in a checkpoint; where N divides none, on the first that
is wide enough to be padded, as FSDP pads (Zhao et al., PyTorch FSDP, VLDB 2023, §3.2.1). N may be a
part of the data ranks: each group of N neighbours then holds all shards, and gradient shards are
summed over the groups (hybrid sharding: there, §3.2.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin
from graphaccel.ir.program import Owned, Sharded
from graphaccel.ir.replication.unfold import input_nodes
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.shard import LEAST_WIDTH


def owned_shards(
    step: StepGraph,
    plan: Plan,
    parameter_shards: Mapping[str, tuple[Sharded, ...]],
    ranks: int | None = None,
) -> tuple[dict[str, Owned], dict[str, str]]:
    """(parameter → its ZeRO level and shard, parameter → why it is not sharded).

    parameter_shards: splits over other axes, applied before. ranks: the number of ranks over which
    ZeRO shards, where the plan is of an evaluation, which has no data axis.

    Raises: BadPin (GA202) for a pinned dim that the axis neither divides nor can be padded for.
    """
    ranks = plan.shards if ranks is None else ranks
    pinned = dict(plan.placements)
    owned: dict[str, Owned] = {}
    whole: dict[str, str] = {}
    if ranks == 1 or not (plan.zero or pinned):
        return owned, whole
    for node, spec in zip(input_nodes(step.graph), step.inputs, strict=True):
        if spec.kind != "parameter":
            continue
        name, value = spec.name, node.meta["val"]
        asked = [s for s in pinned.get(name, ()) if s.axis == "data"]
        level = 3 if asked else 0 if pinned.get(name) == () else plan.zero
        if level == 0 or (level < 3 and name not in step.trainable):
            continue
        splits = parameter_shards.get(name, ())
        if asked:
            _check(name, value.shape, splits, asked[0], plan, ranks)
            owned[name] = Owned(level, replace(asked[0], axis=plan.shard_axis))
        elif not value.is_contiguous():
            whole[name] = "it is not contiguous in memory"
        else:
            dim = data_dim(value.shape, splits, plan, ranks)
            if dim is None:
                whole[name] = f"no dim of {list(value.shape)} can be shared by {ranks}"
            else:
                owned[name] = Owned(level, Sharded(plan.shard_axis, dim))
    return owned, whole


def data_dim(shape: Sequence[int], splits: Sequence[Sharded], plan: Plan, ranks: int) -> int | None:
    """The first dim that `ranks` divides after `splits`, or else the first that can be padded; None
    if there is none."""
    local = local_shape(shape, splits, plan)
    even = even_dim(local, ranks, _taken(shape, splits, plan))
    if even is not None:
        return even
    return next((d for d, size in enumerate(local) if _wide(size, d, splits, ranks)), None)


def even_dim(shape: Sequence[int], ranks: int, taken: Collection[int] = ()) -> int | None:
    """The first dim that `ranks` divides and that is not taken; None if there is none."""
    free = ((d, size) for d, size in enumerate(shape) if d not in taken)
    return next((d for d, size in free if size and size % ranks == 0), None)


def _wide(size: int, dim: int, splits: Sequence[Sharded], ranks: int) -> bool:
    """Whether a dim that `ranks` does not divide can be sharded with little padding. A dim that
    another axis already splits is excluded: no DTensor could describe it."""
    return size >= LEAST_WIDTH * ranks and dim not in {s.dim for s in splits}


def local_shape(shape: Sequence[int], splits: Sequence[Sharded], plan: Plan) -> tuple[int, ...]:
    """The shape of one shard."""
    local = tuple(shape)
    for split in splits:
        local = split.local(local, plan.ranks(split.axis))
    return local


def _taken(shape: Sequence[int], splits: Sequence[Sharded], plan: Plan) -> set[int]:
    """Dims for which, after these splits, no DTensor describes a further contiguous split: dims
    split by sections, or with padding."""
    uneven = (s.dim for s in splits if shape[s.dim] % plan.ranks(s.axis))
    return {s.dim for s in splits if s.outer > 1} | set(uneven)


def _check(
    name: str,
    shape: Sequence[int],
    splits: Sequence[Sharded],
    asked: Sharded,
    plan: Plan,
    ranks: int,
) -> None:
    size = local_shape(shape, splits, plan)[asked.dim]
    even = size % ranks == 0 and asked.dim not in _taken(shape, splits, plan)
    if not (even or _wide(size, asked.dim, splits, ranks)):
        raise BadPin(
            pin="placements",
            value={name: asked},
            reason=f"dim {asked.dim} of {name} {list(shape)} can not be shared evenly by "
            f"{plan.shard_axis} {ranks}",
        )
