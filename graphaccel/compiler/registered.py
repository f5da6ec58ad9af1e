"""Refuses changes of which parameters a model has, ties and trains, after its step was captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from graphaccel.capture.forward import tied_names
from graphaccel.errors import GraphMisuse

_BEFORE = "change the layers of the model before:  graphaccel.optimize(model, optimizer)"


@dataclass(frozen=True)
class Registered:
    """The parameters of a model when its step was captured.

    tied: name → an earlier name of the same parameter. trained: name → whether it requires a
    gradient.
    """

    tied: Mapping[str, str]
    trained: Mapping[str, bool]

    @staticmethod
    def of(model: nn.Module) -> Registered:
        """Those that the model has now."""
        named = model.named_parameters(remove_duplicate=False)
        return Registered(tied_names(model), {n: p.requires_grad for n, p in named})

    def check(self, model: nn.Module) -> None:
        """Raises GraphMisuse (GA407) if the captured step would train another model than this."""
        now = Registered.of(model)
        if now == self:
            return
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
            if trained and not self.trained[name]:
                raise GraphMisuse(
                    what=f"parameter `{name}` was frozen when the step was captured, and is not "
                    "any more",
                    help_line="have it captured as trainable, and freeze it after that:  "
                    "graphaccel.optimize(model, optimizer, example_batch=batch); "
                    "parameter.requires_grad_(False)",
                )
        _check_ties(self.tied, now.tied)


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
