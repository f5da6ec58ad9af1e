"""Runs one step of the user's own model with plain autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.export import OUTSIDE, LossFn, find_loss, split_targets
from graphaccel.capture.export.outputs import flatten_output
from graphaccel.compat.torch.autograd import without_tensor_hooks
from graphaccel.compat.torch.export import parametrizations_computed
from graphaccel.proof.modes import WriteGuard
from graphaccel.proof.results import Results

Tangents = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model as its user calls it. forward: its own, without the replacement by `optimize`."""

    model: nn.Module
    forward: Callable[..., Any]
    loss_fn: LossFn

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return next(nn.Module.parameters(self.model)).device


def run_eager(subject: Subject, batch: Batch, tangents: Tangents, guard: WriteGuard) -> Results:
    """Results of forward and backward.

    batch: leaves that require a gradient are leaves of autograd. tangents: (leaf, output) → the
    gradient of an output, where the script computes the loss. guard: knows which parameters the
    forward writes (`proof.untouched`); nothing else of the model may have changed before.
    """
    results, others = _run(subject, batch, tangents, guard)
    # A leaf that the forward itself created is freed by now, with what was computed from it.
    strangers = tuple(shape for leaf, shape in others if leaf() is not None)
    return replace(results, strangers=strangers)


def _run(
    subject: Subject, batch: Batch, tangents: Tangents, guard: WriteGuard
) -> tuple[Results, list[tuple[weakref.ref[Tensor], tuple[int, ...]]]]:
    """Results, and the autograd leaves that get a gradient but are not the model's, with shapes."""
    model, loss_fn = subject.model, subject.loss_fn
    before = {n: (b, b.detach().clone()) for n, b in model.named_buffers()}
    memory = {n: p.data_ptr() for n, p in model.named_parameters()}
    args, kwargs = batch.rebuild(batch.leaves)
    with (
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        parametrizations_computed(),
    ):
        if callable(loss_fn):
            args, kwargs, targets = split_targets(loss_fn, args, kwargs)
            output = loss_fn(subject.forward(*args, **kwargs), *targets)
        else:
            output = subject.forward(*args, **kwargs)
        leaves, _ = flatten_output(output)
        loss = None if loss_fn == OUTSIDE else find_loss(output)
        tensors = {
            i: x
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and x is not loss and x.is_floating_point()
        }
        heads = {-1: loss} if loss is not None else tensors
        heads = {i: x for i, x in heads.items() if x.requires_grad}
        seeds = None if loss is not None else [tangents(i, x) for i, x in heads.items()]
        buffers = _changed(model, before, memory, guard)
        with _gradients(subject.model, batch, heads.values()) as collect:
            if heads:
                torch.autograd.backward(list(heads.values()), seeds)
            gradients, inputs, strangers = collect()
    results = Results(
        None if loss is None else loss.detach(),
        _kept(model, tensors),
        gradients,
        inputs,
        buffers,
    )
    return results, strangers


def _kept(model: nn.Module, outputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Outputs as they are now. Of those that may be memory of the model (a buffer that the forward
    counts in and returns) copies: its writes are undone before they are compared."""
    own = (*nn.Module.parameters(model), *model.buffers())
    memory = {t.untyped_storage().data_ptr() for t in own}
    kept = {i: x.detach() for i, x in outputs.items()}
    for i, x in outputs.items():
        if x.grad_fn is None or x.untyped_storage().data_ptr() in memory:
            kept[i] = kept[i].clone()
    return kept


@contextmanager
def _gradients(model: nn.Module, batch: Batch, heads: Any) -> Iterator[Callable[[], Any]]:
    """A backward that leaves no `.grad` behind; the yielded function collects the gradients it
    computed.

    `backward` rather than `autograd.grad`: reentrant checkpoints support no other.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
    own = dict(model.named_parameters())
    tracked = {f"leaf {i}": t for i, t in batch.tensors.items() if t.requires_grad}
    known = {*names, *(id(t) for t in tracked.values())}
    others = [t for t in _leaves(heads) if id(t) not in known]

    def collect() -> tuple[dict[str, Tensor], dict[str, Tensor], list]:
        strangers = [(weakref.ref(t), tuple(t.shape)) for t in others if t.grad is not None]
        return _taken(own), _taken(tracked), strangers

    with without_tensor_hooks([*own.values(), *others]):
        yield collect


def _taken(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    collected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        gradient, tensor.grad = tensor.grad, None
        if gradient is not None:
            collected[name] = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return collected


def _leaves(heads: Any) -> list[Tensor]:
    """The autograd leaves that values were computed from."""
    stack, seen, result = [h.grad_fn for h in heads], set(), []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":  # a user's function may set a `ctx.name`
            result.append(node.variable)
        stack += [previous for previous, _ in node.next_functions]
    return result


def _changed(
    model: nn.Module,
    before: Mapping[str, tuple[Tensor, Tensor]],
    memory: Mapping[str, int],
    guard: WriteGuard,
) -> dict[str, Tensor]:
    """New values of buffers, and of parameters that the forward wrote or whose `.data` it replaced,
    by name."""
    collected: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        if name not in before or buffer.shape != before[name][1].shape:
            continue  # made by the forward itself, as a table at its first use
        if buffer is not before[name][0]:
            collected[name] = buffer.detach().clone()
        elif not torch.equal(buffer, before[name][1]):
            collected[name] = buffer.detach().clone()
    parameters = dict(model.named_parameters())
    replaced = (n for n, p in parameters.items() if p.data_ptr() != memory.get(n))
    for name in {*guard.changed(), *replaced} & parameters.keys():
        collected[name] = parameters[name].detach().clone()
    return collected
