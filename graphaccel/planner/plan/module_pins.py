"""Pins on parts of the model: vocabulary sharding, stages of modules, parameter placements."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import fx

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin
from graphaccel.ir.program import Sharded
from graphaccel.ir.replication.unfold import input_nodes
from graphaccel.planner.plan.plan import INTERLEAVES

aten = torch.ops.aten
VOCAB = ("data", "tensor")
SHARDING = ("data", "expert", "context", "tensor")
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_LOOKS = frozenset(
    {
        aten.t.default, aten.transpose.int, aten.permute.default, aten.reshape.default,
        aten.view.default, aten._unsafe_view.default, aten._to_copy.default, aten.slice.Tensor,
        aten.clone.default, aten.constant_pad_nd.default,
    }
)  # fmt: skip


def vocabulary(step: StepGraph) -> dict[str, tuple[tuple[int, ...], int]]:
    """The parameters with one row per vocabulary word: name → (shape, the dim of the words).

    They are the weights (and biases) of the matmuls whose output the softmax of the loss reads, and
    the embedding tables with as many rows; without such a matmul, the largest embedding table.
    """
    graph = step.graph.graph
    pairs = zip(graph.find_nodes(op="placeholder"), step.inputs, strict=True)
    parameters = {node: spec.name for node, spec in pairs if spec.kind == "parameter"}
    tables = {n: int(n.meta["val"].shape[0]) for n in parameters if _is_table(n)}
    heads: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target is aten._log_softmax.default and tables:
            classes = int(node.meta["val"].shape[int(node.args[1])])
            if classes in tables.values():
                heads |= dict.fromkeys(_heads(node.args[0], parameters), classes)
    words = set(heads.values()) or set(sorted(tables.values())[-1:])
    known = {node: n for node, n in tables.items() if n in words} | heads
    results = {}
    for node, name in parameters.items():
        shape = tuple(int(n) for n in node.meta["val"].shape)
        if node in known and known[node] in shape:
            results[name] = shape, 0 if node in tables else shape.index(known[node])
    return results


def _is_table(node: fx.Node) -> bool:
    return any(u.target is aten.embedding.default and u.args[0] is node for u in node.users)


def _heads(scores: fx.Node, parameters: Mapping[fx.Node, str]) -> list[fx.Node]:
    """The parameters of the matmul that computes some scores, through views, casts and shifts."""
    while scores.target in _LOOKS:
        scores = cast(fx.Node, scores.args[0])
    if scores.target not in _MATMULS:
        return []
    results = []
    for node in scores.all_input_nodes:
        while node.target in _LOOKS:
            node = cast(fx.Node, node.args[0])
        results += [node] if node in parameters else []
    return results


def vocabulary_placements(
    where: str, step: StepGraph, sizes: Mapping[str, int]
) -> dict[str, tuple[Sharded, ...]]:
    """The placements of embedding and head under `vocab=where`, by parameter.

    sizes: sizes of the mesh axes. "tensor": sharded by words over the tensor axis, as in
    Megatron-LM; "data": replicated over the tensor axis, with a shard on each data rank that is
    gathered for use, as in FSDP.

    Raises BadPin (GA202) where that is not possible.
    """
    result = vocabulary(step)
    if not result:
        reason = "nothing is looked up by rows (aten.embedding): the model has no vocabulary"
        raise BadPin(pin="vocab", value=where, reason=reason)
    if sizes[where] == 1:
        reason = f"{next(iter(result))} is to be sharded over {where}, which has one device"
        raise BadPin(pin="vocab", value=where, reason=reason)
    if where == "tensor":
        return {name: (Sharded("tensor", dim),) for name, (_, dim) in result.items()}
    placed = {}
    for name, (shape, _) in result.items():
        even = [d for d, n in enumerate(shape) if n % sizes["data"] == 0]
        if not even:
            reason = f"no dim of {name} {list(shape)} can be shared evenly by data {sizes['data']}"
            raise BadPin(pin="vocab", value=where, reason=reason)
        placed[name] = (Sharded("data", even[0]),)
    return placed


def read_stages(value: object, step: StepGraph) -> tuple[tuple[str, int], ...]:
    """`{"transformer.h.3": 1}`, in the order in which the modules first run.

    Raises BadPin (GA202) for a path that is no module that computes something, for a stage that is
    no valid number, and for modules whose stages contradict the order in which they run.
    """
    if not isinstance(value, Mapping):
        raise BadPin(pin="stage_of", value=value, reason="it maps paths of modules to their stage")
    runs: dict[str, list[int]] = {}
    places = step.positions
    modules: dict[str, None] = {}
    for node in step.graph.graph.nodes:
        if node.op == "call_function" and node.meta.get("phase") == "forward":
            path, place = node.meta.get("module", ""), places.get(node.meta.get("origin", ""))
            modules[path] = None
            for name in value:
                if place is not None and is_inside(path, str(name)):
                    runs.setdefault(str(name), []).append(place)
    for name, stage in value.items():
        if str(name) not in runs:
            known = {
                ".".join(m.split(".")[: i + 1]) for m in modules for i in range(m.count(".") + 1)
            }
            close = difflib.get_close_matches(str(name), sorted(known - {""}), 1)
            reason = f"no op belongs to {name}" + (f"; there is {close[0]}" if close else "")
            raise BadPin(pin="stage_of", value={name: stage}, reason=reason)
        if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
            reason = "a stage is a number from 0 on"
            raise BadPin(pin="stage_of", value={name: stage}, reason=reason)
    results = sorted(((str(n), int(s)) for n, s in value.items()), key=lambda p: min(runs[p[0]]))
    _in_order(results, runs)
    return tuple(results)


def check_stages(
    stages: Mapping[str, int],
    cuts: Sequence[str] | None,
    pipeline: int | None,
    interleave: int | None,
    schedule: str | None,
) -> None:
    """Check the stages that modules are pinned to against the other pins: the cuts, and the largest
    possible number of stages. Raises BadPin (GA202)."""
    if cuts is not None:
        raise BadPin(pin="stage_of", value=stages, reason="cuts= says already where stages end")
    if pipeline is None:
        return
    several = pipeline > 1 and schedule in (None, "interleaved")
    most = pipeline * (interleave or (max(INTERLEAVES) if several else 1))
    path, last = max(stages.items(), key=lambda item: item[1])
    if last >= most:
        count = str(most) if interleave or not several else f"{most} at most"
        reason = f"{path} is to be on stage {last}, and there are {count}, from 0 on"
        raise BadPin(pin="stage_of", value=stages, reason=reason)


def read_placements(value: object, step: StepGraph) -> tuple[tuple[str, tuple[Sharded, ...]], ...]:
    """`{"head.weight": shard(0, "tensor")}`, checked against the parameters.

    A module's path stands for the parameters inside it that have the dim; longer paths take
    precedence.
    """
    if not isinstance(value, Mapping):
        raise BadPin(
            pin="placements", value=value, reason="it maps parameters' names to placements"
        )
    nodes = input_nodes(step.graph)
    shapes = {
        s.name: tuple(n.meta["val"].shape)
        for n, s in zip(nodes, step.inputs, strict=True)
        if s.kind == "parameter"
    }
    results: dict[str, tuple[Sharded, ...]] = {}
    for name, said in sorted(value.items(), key=lambda item: str(item[0]).count(".")):
        splits = (said,) if isinstance(said, Sharded) else said
        inside = [name] if name in shapes else [n for n in shapes if is_inside(n, str(name))]
        if not inside:
            close = difflib.get_close_matches(str(name), shapes, 1)
            reason = f"no parameter or module is called {name}"
            reason += f"; there is {close[0]}" if close else ""
            raise BadPin(pin="placements", value={name: said}, reason=reason)
        if not isinstance(splits, tuple) or not all(isinstance(s, Sharded) for s in splits):
            reason = f"{name} is placed by shard(dim, axis), a tuple of them, or replicate()"
            raise BadPin(pin="placements", value={name: said}, reason=reason)
        for split in splits:
            if split.axis not in SHARDING:
                reason = "a tensor can be sharded over data, expert, context or tensor, not "
                raise BadPin(pin="placements", value={name: said}, reason=reason + repr(split.axis))
            if split.outer < 1 or any(
                shapes[n][split.dim] % split.outer
                for n in inside
                if 0 <= split.dim < len(shapes[n])
            ):
                reason = f"dim {split.dim} of {inside[0]} has no {split.outer} equal sections"
                raise BadPin(pin="placements", value={name: said}, reason=reason)
            with_dim = [n for n in inside if 0 <= split.dim < len(shapes[n])]
            if not with_dim:
                reason = f"{inside[0]} is {list(shapes[inside[0]])}: it has no dim {split.dim}"
                raise BadPin(pin="placements", value={name: said}, reason=reason)
            inside = with_dim
        results |= dict.fromkeys(inside, splits)
    return tuple(sorted(results.items()))


def is_inside(path: str, module: str) -> bool:
    """Whether a module path is inside another."""
    return path == module or path.startswith(f"{module}.")


def _in_order(result: Sequence[tuple[str, int]], runs: Mapping[str, Sequence[int]]) -> None:
    for k, (name, stage) in enumerate(result):
        for other, later in result[k + 1 :]:
            if stage > later:
                reason = f"{name} runs before {other}, so it can not be on a later stage"
                raise BadPin(pin="stage_of", value={name: stage, other: later}, reason=reason)
            if stage < later and max(runs[name]) >= min(runs[other]):
                reason = f"{name} still runs when {other} does, so both are on one stage"
                raise BadPin(pin="stage_of", value={name: stage, other: later}, reason=reason)


def shard(dim: int, axis: str) -> Sharded:
    """A tensor is sharded: its dim `dim` is split evenly over mesh axis `axis`.

    For `placements={"head.weight": graphaccel.shard(0, "tensor")}`; axis is "data", "tensor",
    "context" or "expert". A tuple of several is applied in its order.
    """
    return Sharded(axis, dim)


def replicate() -> tuple[Sharded, ...]:
    """A tensor is replicated: every device of its stage holds all of it (see `shard`)."""
    return ()
