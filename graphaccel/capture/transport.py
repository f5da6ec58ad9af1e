"""A `StepGraph` as bytes and back, so that one rank captures and the others are told."""

from __future__ import annotations

from dataclasses import replace

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import graph_bytes, graph_from_bytes


def packed(step: StepGraph) -> bytes:
    """The step as bytes, without what passes derived of it.

    Raises whatever pickle does where the model's output or constants can not be pickled: a class
    of a function's own, for one.
    """
    return graph_bytes((step.fingerprint, replace(step, derived={})))


def unpacked(data: bytes) -> StepGraph | None:
    """The step again; None where the graph that came out is not the one that went in."""
    fingerprint, step = graph_from_bytes(data)
    return step if step.fingerprint == fingerprint else None
