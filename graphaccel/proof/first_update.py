"""Proves at the first step that the user's optimizer makes of shards what it makes of the whole.

The other proofs end with gradients. What a step makes of them is the user's code, which sees shards
in the place of parameters, copies on the host, or whole tensors that are gathered for it; our fused
step replaces it. So a few parameters, one of each kind, are gathered with gradient and state before
the first step, and a copy of the optimizer steps them as one device does. Behind the step every
rank compares what it holds. Of a kind whose parameters are large, some numbers of each shard are
stepped by themselves: an elementwise step of a part is the part of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from graphaccel.compat.torch.optimizers import step_hooks
from graphaccel.errors import UpdateDiffers
from graphaccel.errors.messages import line_of_script
from graphaccel.progress import progress
from graphaccel.proof.gate import MORE
from graphaccel.proof.results import shown
from graphaccel.proof.update_samples import Compared, Sample, Updated, chosen, compared
from graphaccel.runtime.execution.answers import from_all
from graphaccel.runtime.parameters.optimizer_copy import copy_of, shared_attribute
from graphaccel.runtime.parameters.step_hooks import calls_closure_first, closure_of

Optimizer = torch.optim.Optimizer
_SHOWN = 8
_OVERFLOW = "its gradients overflowed in fp16"


@dataclass(frozen=True)
class _Outcome:
    """One rank's comparison. wrong: a sentence for each tensor that differs. moved: parameters
    whose update was seen. reason: why nothing was compared."""

    wrong: tuple[str, ...] = ()
    moved: frozenset[str] = frozenset()
    error: float = 0.0
    reason: str = ""


class FirstUpdate:
    """Hooks around an optimizer's first step, and further ones that show nothing. `before` runs
    where gradients are final and parameters are still the user's, `after` where they are again."""

    def __init__(self, updated: Updated) -> None:
        self._updated, self._left = updated, 1 + MORE
        self._samples: list[Sample] | None = None
        self._nested, self._reason, self._seconds = 0, "", 0.0

    def before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """The hook. A collective while something is to be compared."""
        if not self._left:
            return
        if self._samples is not None:  # a class over one of torch's, whose step calls that one's
            self._nested += 1
            return
        start = time.perf_counter()
        self._samples, self._reason = [], _refused(optimizer, args, kwargs)
        if not self._reason:
            self._samples = chosen(optimizer, self._updated)
            self._reason = self._step(optimizer, args[1:], kwargs)
        self._seconds = time.perf_counter() - start

    def _step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> str:
        """Step the samples; returns why they tell nothing."""
        samples, known = self._samples or [], self._updated.clipping
        if known is not None and known.overflow is not None and bool(known.overflow):
            return _OVERFLOW
        if known is not None:
            known.clip(s.whole.grad for s in samples if s.whole.grad is not None)
        drawn = torch.get_rng_state()
        try:
            settings = {id(s.group): s.group for s in samples}
            groups = [
                {**own, "params": [s.whole for s in samples if id(s.group) == key]}
                for key, own in settings.items()
            ]
            built = copy_of(optimizer, *groups)
            for sample in samples:
                if sample.state:
                    built.state[sample.whole] = sample.state
            type(built).step(built, *args, **kwargs)
            for sample in samples:
                sample.expected.update(built.state.get(sample.whole, {}))
        except Exception as error:  # the optimizer may raise anything
            return f"a copy of {type(optimizer).__name__} raises {type(error).__name__}: {error}"
        finally:
            draws = not torch.equal(drawn, torch.get_rng_state())
            torch.set_rng_state(drawn)
        return f"a step of {type(optimizer).__name__} draws random numbers" if draws else ""

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """The hook behind the step. Raises UpdateDiffers (GA110) on every rank."""
        if self._samples is None:
            return
        if self._nested:
            self._nested -= 1
            return
        start = time.perf_counter()
        samples, self._samples = self._samples, None
        own = _Outcome(reason=self._reason) if self._reason else self._outcome(optimizer, samples)
        everyone: list[Any] = [own]
        if (mesh := self._updated.mesh).world > 1:
            everyone = from_all(own, "the first update of all ranks", mesh.world_group)
        self._seconds += time.perf_counter() - start
        self._conclude(type(optimizer).__name__, everyone)

    def _outcome(self, optimizer: Optimizer, samples: list[Sample]) -> _Outcome:
        results: list[Compared] = [one for s in samples for one in compared(s, optimizer)]
        return _Outcome(
            tuple(one.wrong for one in results if one.wrong),
            frozenset(one.name for one in results if one.moved),
            max((one.error for one in results), default=0.0),
        )

    def _conclude(self, name: str, everyone: list[_Outcome]) -> None:
        wrong = tuple(dict.fromkeys(text for one in everyone for text in one.wrong))
        if wrong:
            more = (f"and {len(wrong) - _SHOWN} more",) * (len(wrong) > _SHOWN)
            raise UpdateDiffers(
                optimizer=name,
                values=(*wrong[:_SHOWN], *more),
                declared=self._updated.declared,
                location=line_of_script(),
            )
        moved = frozenset[str]().union(*(one.moved for one in everyone))
        reason = next((one.reason for one in everyone if one.reason), "")
        if reason or not moved:
            self._left -= 1
            if reason not in ("", _OVERFLOW) or not self._left:
                said = reason or "it changes no parameter by more than rounding"
                progress("not proved", f"the optimizer's update: {said}", self._seconds)
                self._left = 0
            return
        self._left, count = 0, len(moved)
        error = shown(max(one.error for one in everyone))
        text = f"{name}'s update of {count} parameter{'s' * (count > 1)} equals one device's"
        progress("proved", f"{text} ({error})", self._seconds)


def _refused(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> str:
    """Why a step of a copy need not be the optimizer's own; the same on every rank."""
    if name := shared_attribute(optimizer):
        return f"a copy of {type(optimizer).__name__} would share its `{name}`"
    if closure_of(args, kwargs) is not None and not calls_closure_first(optimizer):
        return "its closure may change gradients"
    for hook in step_hooks(optimizer):
        if not str(getattr(hook, "__module__", "")).startswith("graphaccel."):
            described = getattr(hook, "__qualname__", type(hook).__name__)
            return f"the hook `{described}` may change what the step does"
    return ""
