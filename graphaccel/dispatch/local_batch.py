"""Joins the parts of a batch that ranks read for themselves, and cuts outputs to a rank's own rows.

With `batch="local"` each rank calls the model on other rows, as under DistributedDataParallel. The
parts are all-gathered, in the order of the ranks, into the global batch that every plan wants: what
a rank reads does not depend on the plan. Of the outputs that have rows each rank gets those that it
gave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphaccel.arguments import LOCAL
from graphaccel.capture.batch import Batch, batch_leaves, has_dims
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH
from graphaccel.dispatch.run import Prepared, Run
from graphaccel.errors import GraphMisuse
from graphaccel.ir.program import Value
from graphaccel.ir.values import returned
from graphaccel.passes.microbatch.exact_microbatch import batch_placement
from graphaccel.runtime.agreement import TRAIN
from graphaccel.runtime.execution.parts import part_of
from graphaccel.sharding.rules.batch_placement import sharded_dim

Rows = tuple[int, int]
"""The dim that has the rows, and the sections before them in it, each with all examples."""


@dataclass(frozen=True)
class Joined:
    """The global batch of a call. dims: the leaves that were joined, with their batch dim; None
    where every rank gave the global batch."""

    batch: Batch
    dims: Mapping[int, int] | None = None


def joined(run: Run, call: str, batch: Batch, prepared: Prepared | None) -> Joined:
    """The global batch of a call in which each rank gave its own rows; the batch itself where all
    give the global one. Collective. prepared: the plan, where there is one.

    Raises BatchesDiffer (GA404) on every rank where ranks give other inputs or sizes, RankLost
    (GA501), GraphMisuse (GA407) for inputs that can not be joined, and where all ranks give the
    same rows to the first training step.
    """
    if run.settings.batch != LOCAL or run.settings.devices == 1:
        return Joined(batch)
    dims = _dims(run, batch, None if prepared is None else prepared.planned.step)
    run.agreement.check_parts(call, batch, dims)
    leaves, same = list(batch.leaves), bool(dims)
    for leaf, dim in dims.items():
        if leaves[leaf].requires_grad:
            raise GraphMisuse(
                what=f'`{batch.names[leaf]}` requires a gradient, and batch="local" joins it with '
                "the rows of other ranks",
                help_line="optimize(model, optimizer)  # and give every rank the global batch",
            )
        parts = run.agreement.all_gather(leaves[leaf])
        same = same and bool((parts == parts[:1]).all())
        leaves[leaf] = _joined(parts, (dim, 1))
    if same and call == TRAIN and prepared is None:
        raise GraphMisuse(
            what='all ranks pass the same rows, where batch="local" says that each has its own: '
            "optimize() gives them the random states of rank 0",
            help_line="draw rows from a generator of each rank:  "
            "torch.Generator().manual_seed(torch.distributed.get_rank())",
            other_help="or, if they are meant to be the same:  "
            "graphaccel.optimize(model, optimizer)",
        )
    return Joined(replace(batch, leaves=tuple(leaves)), dims)


def own_rows(
    run: Run, whole: Joined, step: StepGraph, outputs: Mapping[int, Tensor]
) -> Mapping[int, Tensor]:
    """The outputs of a step by leaf, cut to the rows that this rank gave.

    Gradients that the script computes of them are the mean over the ranks, as under
    DistributedDataParallel. Raises GraphMisuse (GA407) where the batch dims of the inputs turn out
    to be others, or rows of an output are not known.
    """
    if whole.dims is None:
        return outputs
    if dict(whole.dims) != dict(step.batch_dims):
        raise _ambiguous(whole.batch, step)
    few = step if step.repeats is None else step.repeats.short
    rows, unknown = few.analyses.cached((), _rows, few)
    if own := unknown & outputs.keys():
        raise GraphMisuse(
            what=f"the size of output {min(own)} of the model depends on the batch, but "
            'batch="local" finds no rows of single examples to cut in it',
            help_line="optimize(model, optimizer)  # and give every rank the global batch",
        )
    kept = [leaf for leaf in outputs if outputs[leaf].requires_grad]
    ranks, rank = run.settings.devices, dist.get_rank()
    results = {
        leaf: _part(output, rows.get(leaf), rank, ranks)
        for leaf, output in outputs.items()
        if leaf not in kept
    }
    if kept:
        reads = tuple(rows.get(leaf) for leaf in kept)
        gather = run.agreement.all_gather
        parts = _OwnRows.apply(reads, rank, ranks, gather, *(outputs[leaf] for leaf in kept))
        results |= dict(zip(kept, parts, strict=True))
    return {leaf: results[leaf] for leaf in outputs}


def _dims(run: Run, batch: Batch, planned: StepGraph | None) -> Mapping[int, int]:
    """Leaf → its batch dim: as the user gave it, as the plan has it, or the leading one."""
    given = run.compiler.captures.given_dims(batch)
    if given is not None:
        return given
    if planned is not None and has_dims(batch, planned.batch_dims):
        return planned.batch_dims
    return batch_leaves(batch)[1]


def _rows(step: StepGraph) -> tuple[dict[int, Rows], frozenset[int]]:
    """Output leaf → where it has the rows of the batch; and leaves whose size depends on the batch
    without such rows."""
    results: dict[int, Rows] = {}
    unknown: set[int] = set()
    places = batch_placement(step).places
    for spec, node in zip(step.outputs, returned(step.graph), strict=True):
        if spec.kind != "output" or not isinstance(node, fx.Node):
            continue
        place = sharded_dim(places[node]) if node in places else None
        if place is not None:
            results[spec.leaf] = place
        elif any(BATCH in getattr(n, "free_symbols", ()) for n in node.meta.get("dims", ())):
            unknown.add(spec.leaf)
    return results, frozenset(unknown)


def _part(output: Tensor, rows: Rows | None, rank: int, ranks: int) -> Tensor:
    """A rank's rows of an output; all of it where it has none."""
    if rows is None:
        return output
    return part_of(output, Value("batch", "", batch_dim=rows[0], outer=rows[1]), rank, ranks)


def _joined(parts: Tensor, rows: Rows) -> Tensor:
    """The whole of the ranks' parts, [ranks, ...part]: the reverse of `_part`."""
    dim, outer = rows
    if outer == 1:
        return torch.cat(parts.unbind(), dim)
    sections = [part.unflatten(dim, (outer, -1)) for part in parts.unbind()]
    return torch.cat(sections, dim + 1).flatten(dim, dim + 1)


class _OwnRows(torch.autograd.Function):
    """Outputs of the whole batch → this rank's rows. Backward: the ranks' gradients, joined."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Sequence[Rows | None],
        rank: int,
        ranks: int,
        gather: Callable[[Tensor], Tensor],
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """The rows, in tensors of their own."""
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.ranks, ctx.gather = rows, ranks, gather
        parts = tuple(_part(o, own, rank, ranks) for o, own in zip(outputs, rows, strict=True))
        ctx.empty = [partial(part.new_zeros, part.shape) for part in parts]
        return tuple(part.clone() for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Gradients of the whole outputs: of the mean over the ranks."""
        mine = torch.tensor([grad is not None for grad in grads])
        wanted = ctx.gather(mine).any(0).tolist()  # ranks may use other outputs
        results: list[Tensor | None] = []
        for grad, rows, empty, any_rank in zip(grads, ctx.rows, ctx.empty, wanted, strict=True):
            if not any_rank:
                results.append(None)
                continue
            parts = ctx.gather(empty() if grad is None else grad) / ctx.ranks
            results.append(parts.sum(0) if rows is None else _joined(parts, rows))
        return (None, None, None, None, *results)


def _ambiguous(batch: Batch, step: StepGraph) -> GraphMisuse:
    dims = {batch.names[leaf]: dim for leaf, dim in step.batch_dims.items()}
    return GraphMisuse(
        what='batch="local" joined the ranks\' rows along the leading dims of the inputs, but the '
        f"model has its examples on {dims}",
        help_line=f"optimize(model, optimizer, batch='local', batch_dims={dims})",
    )
