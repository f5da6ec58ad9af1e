"""Serialise a `StepGraph`, so that one rank captures and sends the result to the others.

A step of many identical layers is sent as the steps of few from which it was built."""

from __future__ import annotations

from dataclasses import replace

from graphaccel.capture.stepgraph import Repeats, StepGraph, expanded
from graphaccel.compat.torch.graphs import graph_bytes, graph_from_bytes


def packed(step: StepGraph) -> bytes:
    """The step as bytes, without its cached analyses.

    Raises whatever pickle does where the model's output or constants cannot be pickled: a class
    defined in a function, for example.
    """
    few = step.repeats
    if few is None:
        return graph_bytes((step.fingerprint, _bare(step)))
    plain = Repeats(few.runs, _bare(few.short), tuple(map(_bare, few.longer)))
    return graph_bytes((step.fingerprint, plain, dict(step.tied), step.trainable))


def _bare(step: StepGraph) -> StepGraph:
    """The step without cached properties, the fingerprint among them."""
    return replace(step)


def unpacked(data: bytes) -> StepGraph | None:
    """The step from bytes; None where the resulting graph differs from the one that was packed."""
    fingerprint, sent, *rest = graph_from_bytes(data)
    step = expanded(sent, *rest) if isinstance(sent, Repeats) else sent
    return step if step.fingerprint == fingerprint else None
