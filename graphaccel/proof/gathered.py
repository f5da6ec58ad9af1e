"""Gathers weights of which ranks hold shards, to compare the model with eager code on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from graphaccel.compiler.model import with_data
from graphaccel.ir.replication.layers import NotRepeated
from graphaccel.proof.comparison import Pair
from graphaccel.proof.eager_step import Subject
from graphaccel.proof.first_step import room_for_weights
from graphaccel.proof.layers import few_layers
from graphaccel.runtime.execution.answers import from_first
from graphaccel.runtime.module import own_forward
from graphaccel.runtime.parameters.state import full_state
from graphaccel.runtime.session import Session


def gathered(session: Session, model: nn.Module, pair: Pair | None) -> Pair | str:
    """On rank 0 a pair with weights: of a few layers of a model of many identical ones, else of the
    full model. Elsewhere and where memory does not suffice: why there is none. A collective, which
    holds one full tensor at a time on other ranks.

    pair: on rank 0, the model without data beside its step.
    """
    said: list[Any] = [None]
    names: dict[int, str] = {}
    if pair is not None:
        skeleton, reason = pair.subject.model, ""
        try:
            pair = few_layers(pair)
        except NotRepeated as error:
            if not room_for_weights(skeleton, session.mesh.device, copies=3):
                reason = f"not enough memory for all weights on one rank, and {error}"
        known = {id(t) for _, t in _tensors(pair.subject.model)}
        names = {id(t): name for name, t in _tensors(skeleton) if id(t) in known}
        said = [reason or list(names.values())]
    if session.mesh.world > 1:
        said = [from_first(said[0], "the weights that rank 0 compares")]
    if isinstance(said[0], str):
        return said[0]
    own = dict(_tensors(model))
    full: dict[str, Tensor] = {}
    for name in said[0]:
        whole = full_state(session, {name: own[name].detach()})[name]
        if pair is not None:
            full[name] = whole.to(session.mesh.device)
    if pair is None:
        return "it is compared on rank 0"
    built = with_data(pair.subject.model, {i: full[name] for i, name in names.items()})
    subject = Subject(built, own_forward(built), pair.subject.loss_fn)
    return replace(pair, subject=subject, gathered=True)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
