"""Plan a model for several numbers of devices, batch sizes, sequence lengths, or pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphaccel.capture.batch import Batch, resized, sequence_leaves, sequence_matrices
from graphaccel.compiler.compiler import Compiler, Planned
from graphaccel.errors import BadPin, GraphAccelError, GraphMisuse
from graphaccel.planner.cluster.cluster import Cluster


@dataclass(frozen=True)
class Point:
    """One size of the axis. planned: None where there is no plan, and then `reason` says why."""

    size: int | Mapping[str, Any]
    planned: Planned | None
    reason: str = ""


def sweep(
    compiler: Compiler,
    batch: Batch,
    axis: str,
    sizes: Sequence[Any],
    cluster: Callable[[int], Cluster],
) -> Iterator[Point]:
    """A plan for each size, in the given order.

    axis: "devices", "batch", "sequence", or "pins", whose sizes are pins by name. cluster: the
        hardware with so many devices.

    Raises GraphMisuse (GA407) for the sequence of a model without one, and what capture raises for
    the batch as it is given.
    """
    resize = _sequence(compiler, batch) if axis == "sequence" else None
    for size in sizes:
        own, given = compiler, batch
        try:
            if axis == "devices":
                own = compiler.on(cluster(size))
            elif axis == "pins":
                own = compiler.with_pins({**compiler.pins, **size})
            elif axis == "batch":
                given = compiler.of_size(batch, size)
            elif resize is not None:  # a plan is for the sequence of its capture
                own = Compiler(compiler.model, compiler.cluster, compiler.pins)
                given = resize(size)
            yield Point(size, own.choose(given))
        except GraphAccelError as error:
            yield Point(size, None, f"{error.code}: {_said(error)}")


def _said(error: GraphAccelError) -> str:
    """An error in one line of a table."""
    if isinstance(error, BadPin):
        return f"{error.pin}={error.value}: {error.reason}"
    return error.message().sentence


def _sequence(compiler: Compiler, batch: Batch) -> Callable[[int], Batch]:
    """A function that gives the batch another sequence length."""
    dims = compiler.capture(batch)[0].batch_dims
    length, integers = sequence_leaves(batch, dims)
    if not length:
        raise GraphMisuse(
            what="the batch has a sequence: integers of [batch, sequence], all of one length",
            help_line="sweep over devices or batch instead",
        )
    matrices = sequence_matrices(batch, dims, length, integers)
    return lambda size: resized(batch, matrices, size)
