"""The compiled steps of a model: for a kind of batch one for each state of Python's it ran in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphaccel.capture.state.carried import Path
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch.modes import changing_modes
from graphaccel.compat.torch.tensors import version
from graphaccel.errors import StateFrozen
from graphaccel.guards.guards import Guards
from graphaccel.guards.place import Place
from graphaccel.guards.reads import line_of
from graphaccel.guards.refusals import unsteady
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Precision
from graphaccel.progress import progress
from graphaccel.runtime.session import CompiledStep, Session


@dataclass
class Variant:
    """One compiled step and what it depends on besides its batch.

    step: as captured. filled: constant of its graph → the model's tensor whose values it has, and
    that tensor's version. left: where the forward leaves values for the script, which its graph
    does not.
    """

    compiled: CompiledStep
    guards: Guards
    step: StepGraph
    left: tuple[Path | Place, ...] = ()
    filled: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    def leaves(self, session: Session, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of the step: the batch's leaves, then the numbers of the model that are inputs
        (float64, 0-dim). Constants get the values that the model's tensors have now."""
        for name, tensor in self.guards.tensors_now().items():
            kept = self.filled.get(name)
            if kept is None or kept[0] is not tensor or kept[1] != version(tensor):
                session.fill(self.compiled, name, tensor)
                self.filled[name] = tensor, version(tensor)
        numbers = self.guards.numbers_now()
        return (*leaves, *(torch.tensor(n, dtype=torch.float64) for n in numbers))


class Variants:
    """Compiled steps by key, at most `most` of them: the one not used for longest is dropped.

    dropped: called with a step that is dropped. All ranks make the same calls, and drop the same.
    """

    def __init__(self, most: int, dropped: Callable[[CompiledStep], None]) -> None:
        self._most, self._dropped = most, dropped
        self._known: dict[Any, list[Variant]] = {}  # latest used last
        self._reported = False

    def find(self, key: Any, trained: frozenset[str] = frozenset()) -> Variant | None:
        """The one whose guards hold, and which trains these parameters."""
        known = self._known.get(key, [])
        for place, variant in enumerate(known):
            if trained <= variant.step.trainable and variant.guards.hold():
                if place:
                    known.insert(0, known.pop(place))
                self._known[key] = self._known.pop(key)
                return variant
        return None

    def add(self, key: Any, variant: Variant, *, example: bool = False) -> Variant:
        """Remember one. Raises StateFrozen (GA106) where a value that it was captured with is
        another one already, unless it was captured of an example, before any step."""
        if not example and not variant.guards.hold():
            raise unsteady(variant.guards.changes()[0])
        known = self._known.pop(key, [])
        self._known[key] = [variant, *known]
        if sum(map(len, self._known.values())) > self._most:
            self._drop()
        return variant

    def _drop(self) -> None:
        oldest = next(iter(self._known))
        self._dropped(self._known[oldest].pop().compiled)
        if not self._known[oldest]:
            del self._known[oldest]
        if not self._reported:
            self._reported = True
            progress("programs", _full(self._most), 0.0)


def _full(most: int) -> str:
    return (
        f"more than max_programs={most} shapes of batches: a program is made anew for one that was "
        "not used for long; pad lengths to a multiple to have fewer shapes"
    )


def check_around(precision: Precision, device_type: str) -> None:
    """Raises StateFrozen (GA106) where an autocast is active that the plan does not say, or a mode
    in which functions of torch may be other ones."""
    for mode in changing_modes():
        raise StateFrozen(
            what=f"`{mode}`, a TorchFunctionMode, is active around a step",
            location=line_of(sys._getframe(1)),
            note="the model is called here",
            reason="the step runs a graph of ops, in which the functions that it would see are not "
            "called any more",
            help_lines=("call the model outside of it, and do in its forward what the mode does",),
        )
    if not torch.is_autocast_enabled(device_type):
        return
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    if dtype in (precision.compute, "float32"):
        return
    names = [n for n, p in PRECISIONS.items() if p.compute == dtype and p.stream == "float32"]
    pin = f'precision="{names[0]}"' if names else ""
    helps = (f"say it to the plan instead:  graphaccel.optimize(model, optimizer, {pin})",)
    raise StateFrozen(
        what=f"torch.autocast in {dtype} is active around a step that is planned in "
        f"{precision.compute}",
        location=line_of(sys._getframe(1)),
        note="the model is called here",
        reason="the plan decides in which precision the step computes, and what memory it takes",
        help_lines=(*(helps if pin else ()), "or call the model outside of torch.autocast"),
    )
