"""Record which torch functions a forward calls, and on which tensors: in training and evaluation.

Two forwards with equal records compute the same, except for what functions do that take a flag for
training: dropout, and normalisation by statistics of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from graphaccel.capture.batch import Batch
from graphaccel.capture.export.expert_loops import batched_experts
from graphaccel.capture.export.export import LossFn, Returned, with_loss
from graphaccel.capture.export.reports import without_reports
from graphaccel.capture.state.draws import generators_restored
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.export import exporting
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.guards.effects import output_dropped

_COUNTER = "num_batches_tracked"
"""The buffer in which batch norm counts the batches that it was trained with."""


@dataclass(frozen=True)
class TorchCalls:
    """What a forward called.

    calls: each function with its arguments; a tensor stands as the call that made it. results: the
    tensors that it returned, likewise. returned: their structure. drops, norms: how many calls drop
    values, and how many normalise by statistics of the batch.
    """

    calls: tuple[Any, ...] = field(repr=False)
    results: tuple[Any, ...] = field(repr=False)
    returned: Returned
    drops: int
    norms: int

    def same_but_mode(self, training: TorchCalls) -> bool:
        """Whether this forward, in evaluation mode, is the training one without dropout, normalised
        by running statistics."""
        own, other = self.returned, training.returned
        return (
            not self.drops
            and not self.norms
            and self.calls == training.calls
            and self.results == training.results
            and own == other
            and own.plain.keys() == other.plain.keys()
            and all(_same(own.plain[i], other.plain[i]) for i in own.plain)
        )


def torch_calls(model: nn.Module, batch: Batch, loss_fn: LossFn) -> TorchCalls | None:
    """What the forward of a fake model calls on a fake batch; None where it needs values."""
    fake = next(p for p in nn.Module.parameters(model) if isinstance(p, FakeTensor)).fake_mode
    counters = (b for n, b in model.named_buffers() if n.rpartition(".")[2] == _COUNTER)
    record, notes = _Record({id(b) for b in counters}), []
    args, kwargs = batch.rebuild(batch.leaves)
    try:
        with (
            generators_restored(),
            output_dropped(),
            without_reports(),
            fake,
            exporting(),
            torch.enable_grad(),
            batched_experts(model),
            record,
        ):
            results = with_loss(model, loss_fn, notes.append)(*args, **kwargs)
    except Exception:  # whatever the model raises when it needs a value
        return None
    said = tuple(record.said(each) for each in results)
    return TorchCalls(tuple(record.calls), said, notes[-1], record.drops, record.norms)


class _Record(TorchFunctionMode):
    """Records every torch function that is called, but none that such a function calls.

    counters: ids of the buffers of batch norm that count batches: only training writes them, and
    nothing else reads them.
    """

    def __init__(self, counters: set[int]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.drops = self.norms = 0
        self._counters = counters
        self._made: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []  # or an id could be used again

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.add_ and id(args[0]) in self._counters:
            return func(*args, **kwargs)
        context = (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda")))
        plain, active = self._without_mode(func, args, kwargs)
        call = (func, context, self.said(plain))
        result = func(*args, **kwargs)
        if func in _DROPS and any(result is each for each in args):
            result = torch.ops.aten.alias.default(result)  # dropped, it is another tensor
        self.drops += active and func is not F.batch_norm
        self.norms += active and func is F.batch_norm
        tensors = (x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor))
        self._made |= {id(x): (len(self.calls), i) for i, x in enumerate(tensors)}
        self._alive += (args, kwargs, result)
        self.calls.append(call)
        return result

    def _without_mode(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, bool]:
        """The arguments without those that differ between training and evaluation, and whether the
        call does what only training does."""
        split = _FLAGS.get(func)
        if split is None:
            return (args, dict(kwargs)), False
        return split(args, dict(kwargs))

    def said(self, value: Any) -> Any:
        """A value as what compares: a tensor as the call that made it, else as itself."""
        if isinstance(value, torch.Tensor):
            return ("made", *self._made[id(value)]) if id(value) in self._made else id(value)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(self.said, value))
        if isinstance(value, dict):
            return dict, tuple((key, self.said(each)) for key, each in value.items())
        if isinstance(value, slice):
            return slice, tuple(map(self.said, (value.start, value.stop, value.step)))
        return (type(value), repr(value)) if isinstance(value, _PLAIN) else id(value)


_PLAIN = (
    *(int, float, complex, bool, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    training = kwargs.pop("training")
    return (args, kwargs), training and kwargs.get("p", 0.0) > 0


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    training = kwargs.pop("training")
    return (args, kwargs), training


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """`dropout_p` is the argument after query, key, value and mask."""
    place = 4
    rate = args[place] if len(args) > place else kwargs.pop("dropout_p", 0.0)
    return ((*args[:place], *args[place + 1 :]), kwargs), rate > 0


def _multi_head(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The eleventh argument is `dropout_p`."""
    training = kwargs.pop("training")
    return (args, kwargs), training and args[10] > 0


_DROPS = frozenset({F.dropout})
_FLAGS: Mapping[Any, Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, bool]]] = {
    F.dropout: _dropout,
    F.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
}
"""Functions with an argument for whether the model is trained → what reads it."""


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and isinstance(left, _PLAIN) and left == right
