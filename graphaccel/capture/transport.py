"""A `StepGraph` as bytes and back, so that one rank captures and the others are told.

One of many identical layers travels as those of few that it was made of."""

from __future__ import annotations

from dataclasses import replace

from graphaccel.capture.stepgraph import Repeats, StepGraph, expanded
from graphaccel.compat.torch import graph_bytes, graph_from_bytes


def packed(step: StepGraph) -> bytes:
    """The step as bytes, without what passes derived of it.

    Raises whatever pickle does where the model's output or constants can not be pickled: a class
    of a function's own, for one.
    """
    few = step.repeats
    if few is None:
        return graph_bytes((step.fingerprint, _bare(step)))
    plain = Repeats(few.runs, _bare(few.short), tuple(map(_bare, few.longer)))
    return graph_bytes((step.fingerprint, plain, dict(step.tied), step.trainable))


def _bare(step: StepGraph) -> StepGraph:
    return replace(step, derived={})


def unpacked(data: bytes) -> StepGraph | None:
    """The step again; None where the graph that came out is not the one that went in."""
    fingerprint, sent, *rest = graph_from_bytes(data)
    step = expanded(sent, *rest) if isinstance(sent, Repeats) else sent
    return step if step.fingerprint == fingerprint else None
