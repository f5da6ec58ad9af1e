"""Refuses changes of which parameters and buffers a model has, after its step was captured: their
shapes and dtypes, which are tied."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from graphaccel.capture.forward import tied_among
from graphaccel.errors import GraphMisuse

_BEFORE = "change the layers of the model before:  graphaccel.optimize(model, optimizer)"


@dataclass(frozen=True)
class Registered:
    """The parameters of a model when its step was captured, and the buffers that the step reads.

    tied: name → an earlier name of the same parameter. trained: name → whether it requires a
    gradient. forms: name → dtype and shape of a parameter. buffers: the same of a buffer.
    """

    tied: Mapping[str, str]
    trained: Mapping[str, bool]
    forms: Mapping[str, tuple[torch.dtype, torch.Size]]
    buffers: Mapping[str, tuple[torch.dtype, torch.Size]]

    @staticmethod
    def of(model: nn.Module, buffers: Collection[str]) -> Registered:
        """Those that the model has now; of its buffers, the ones with these names."""
        named = dict(model.named_parameters(remove_duplicate=False))
        held = model.named_buffers(remove_duplicate=False)
        return Registered(
            tied_among(named.items()),
            {n: p.requires_grad for n, p in named.items()},
            {n: (p.dtype, p.shape) for n, p in named.items()},
            {n: (b.dtype, b.shape) for n, b in held if n in buffers},
        )

    def check(self, model: nn.Module) -> frozenset[str]:
        """The names of the parameters that are trained now. Raises GraphMisuse (GA407) if the
        captured step is of another model than this."""
        now = Registered.of(model, self.buffers)
        if now != self:
            self._compare(now)
        return frozenset(name for name, trained in now.trained.items() if trained)

    def _compare(self, now: Registered) -> None:
        for name in self.trained:
            if name not in now.trained:
                raise GraphMisuse(
                    what=f"the model had a parameter `{name}` when the step was captured, and has "
                    "none now",
                    help_line=_BEFORE,
                )
        for name, trained in now.trained.items():
            if trained and name not in self.trained:
                raise GraphMisuse(
                    what=f"the model had no parameter `{name}` when the step was captured",
                    help_line=_BEFORE,
                )
        _check_ties(self.tied, now.tied)
        self._check_shapes(now)

    def _check_shapes(self, now: Registered) -> None:
        for name, (dtype, shape) in self.forms.items():
            new_dtype, new_shape = now.forms[name]
            if new_shape != shape:
                raise GraphMisuse(
                    what=f"parameter `{name}` had the shape {list(shape)} when the step was "
                    f"captured, and has {list(new_shape)} now",
                    help_line=_BEFORE,
                )
            if new_dtype != dtype:
                raise GraphMisuse(
                    what=f"parameter `{name}` was {dtype} when the step was captured, and is "
                    f"{new_dtype} now",
                    help_line=f"convert the model back:  model.to({dtype})",
                    other_help="or convert it before:  "
                    f"graphaccel.optimize(model.to({new_dtype}), optimizer)",
                )
        for name, (dtype, shape) in self.buffers.items():
            if now.buffers.get(name) != (dtype, shape):
                other = now.buffers.get(name)
                became = "is None" if other is None else f"is {other[0]} {list(other[1])}"
                raise GraphMisuse(
                    what=f"buffer `{name}` was {dtype} {list(shape)} when the step was captured, "
                    f"and {became} now",
                    help_line="write values into it:  with torch.no_grad(): buffer.copy_(values)",
                )


def _check_ties(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in (*before, *now):
        if before.get(name) != now.get(name):
            other = before.get(name) or now[name]
            was, became = ("one", "two") if name in before else ("two parameters", "one")
            raise GraphMisuse(
                what=f"`{other}` and `{name}` were {was} when the step was captured, and are "
                f"{became} now",
                help_line="tie weights before:  graphaccel.optimize(model, optimizer)",
            )
