"""Checks before every step that all ranks make the same call on the same batch.

Before a step starts the ranks exchange a few numbers over a gloo group of their own: which call of
the model this is, the batch's structure and values, the random generator's state, the optimizer's
settings, which parameters are trained, the state that the script's forward reads and weights that
several ranks hold (`runtime.copies`). Nothing has been compiled or sent by then, so all ranks
detect a difference, in shapes too, and raise the same error instead of waiting for each other.
Values on a GPU are compared one step later, so that no step waits for the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphaccel.capture.batch import Batch, CallNumber
from graphaccel.compat.torch.distributed import all_gather_flat
from graphaccel.errors import BatchesDiffer, RankLost
from graphaccel.runtime import digest
from graphaccel.runtime.copies import NUMBERS, Copies, unequal
from graphaccel.runtime.execution.failures import cause_of
from graphaccel.runtime.execution.lost_rank import is_connection

Optimizer = torch.optim.Optimizer

TRAIN, EVALUATE, BACKWARD = "runs a training step", "evaluates", "runs a backward"
PLAN, STATE = "plans", "calls full_state_dict()"
SAVE, LOAD = "saves", "loads"
_OF_PARTS = {"inputs": "parts", "values": "rest"}
_WITH_WEIGHTS = (TRAIN, EVALUATE, STATE, SAVE)
_CALLS = (TRAIN, EVALUATE, BACKWARD, PLAN, STATE, SAVE, LOAD)


@dataclass(frozen=True)
class _Seen:
    """What one rank reports, as int64 numbers, in the order in which differences are reported."""

    call: int = 0
    inputs: int = 0
    before: int = 0
    values: int = 0
    trained: int = 0
    state: int = 0
    optimizer: int = 0
    random: int = 0


class Agreement:
    """Compares what the ranks of a job are about to do. `check` is collective over all of them."""

    def __init__(
        self, ranks: int, device: torch.device, timeout: timedelta, optimizer: Optimizer | None
    ) -> None:
        """device: this rank's. optimizer: its settings and its number of steps are compared."""
        self._ranks, self._device = ranks, device
        self._optimizer, self._optimizer_steps = optimizer, 0
        # A group of its own: no collective of the script or of a step can interleave.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if ranks > 1 else None
        self._later = digest.Later()
        self._copies: Copies | None = None
        self._inputs: dict[tuple[Any, ...], int] = {}
        self._trained: tuple[frozenset[str], int] = (frozenset(), 0)
        self.steps = 0

    def count_optimizer_steps(self) -> None:
        """Count steps from now on: an optimizer is left untouched until its model has a plan."""
        if self._optimizer is not None and self._ranks > 1:
            self._optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def compare_weights(self, copies: Copies) -> None:
        """Compare weights, too, from now on, in calls that use them."""
        if self._ranks > 1:
            self._copies = copies

    def check(
        self,
        call: str,
        batch: Batch | None = None,
        *,
        values: bool = True,
        weights: bool = True,
        state: str = "",
        random: bool = False,
        trained: frozenset[str] | None = None,
    ) -> Sequence[Any]:
        """The leaves of the batch, once every rank is known to make the same call.

        call: one of the names above. values: whether the batch's values matter. weights: whether
        those of this rank can be read. state: what else the step depends on, as a text or a digest.
        random: whether it draws from torch's generator. trained: the names of the parameters that
        require a gradient, where they are known.

        Large leaves on the host are returned on this rank's GPU, where their digest is computed.

        Raises BatchesDiffer (GA404) on every rank, RankLost (GA501) if a rank does not answer.
        """
        leaves = () if batch is None else batch.leaves
        if self._ranks == 1:
            return leaves
        host: list[torch.Tensor] = []
        there: list[torch.Tensor] = []
        if batch is not None and values:
            leaves = tuple(map(self._placed, leaves))
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    (there if leaf.device.type != "cpu" else host).append(leaf)
        mine = _Seen(
            call=_CALLS.index(call),
            inputs=0 if batch is None else self._signature(batch),
            before=self._later.take(),
            values=digest.of_host(host),
            trained=self._names(trained or frozenset()),
            state=digest.of_text(state),
            optimizer=self._settings(),
            random=digest.of_host([torch.random.get_rng_state()]) if random else 0,
        )
        held = self._weights(call) if weights else ()
        self._compare(mine, lambda: _described(call, batch), weights=held)
        if there:
            self._later.send(digest.of_device(there))
        self.steps += call == TRAIN
        return leaves

    def check_parts(self, call: str, batch: Batch, joined: Collection[int]) -> None:
        """Check that every rank makes the same call on as many rows of the same sizes.

        joined: leaves with rows, whose values may be others on each rank. Raises BatchesDiffer
        (GA404) on every rank, RankLost (GA501) if a rank does not answer.
        """
        rest = [tensor.cpu() for leaf, tensor in batch.tensors.items() if leaf not in joined]
        mine = _Seen(
            call=_CALLS.index(call), inputs=self._signature(batch), values=digest.of_host(rest)
        )
        self._compare(mine, lambda: _described(call, batch), parts=True)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """What each rank has, of one shape and dtype: [ranks, ...]. Raises RankLost (GA501)."""
        own = part.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = own.new_empty(self._ranks * own.numel())
        try:
            all_gather_flat(whole, own, group=self._group if own.is_cpu else None)
        except RuntimeError as error:
            if not is_connection(error):
                raise
            raise self._lost(error, "a part of the batch of all ranks") from error
        return whole.view(part.dtype).view(self._ranks, *part.shape)

    def _placed(self, leaf: Any) -> Any:
        """The leaf on the device, for a leaf whose digest is computed there: it is needed there
        anyway."""
        moves = isinstance(leaf, torch.Tensor) and not leaf.requires_grad
        return leaf.to(self._device) if moves and self._device.type != "cpu" else leaf

    def _signature(self, batch: Batch) -> int:
        signature = batch.signature()
        if signature not in self._inputs:
            # The default repr of an object contains its address, which differs between processes.
            text = re.sub(r" at 0x[0-9a-f]+", "", repr((signature, batch.names)))
            self._inputs[signature] = digest.of_text(text)
        return self._inputs[signature]

    def _names(self, trained: frozenset[str]) -> int:
        """Digest of names, which are those of the step before almost always."""
        if trained != self._trained[0]:
            self._trained = trained, digest.of_text(" ".join(sorted(trained)))
        return self._trained[1]

    def _settings(self) -> int:
        """Digest of the optimizer's numeric settings (rates, betas) and its number of steps."""
        groups = () if self._optimizer is None else self._optimizer.param_groups
        results: list[Any] = [self._optimizer_steps]
        for group in groups:
            for key, value in group.items():
                if key != "params":
                    results += [v for v in (value if isinstance(value, tuple) else (value,))]
        return digest.of_numbers(
            float(v)
            for v in results
            if isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.is_cpu)
        )

    def _compare(
        self,
        mine: _Seen,
        describe: Callable[[], str],
        *,
        parts: bool = False,
        weights: Sequence[int] = (),
    ) -> None:
        names = [field.name for field in fields(mine)]
        held = weights or [0] * NUMBERS
        own = torch.tensor([*(getattr(mine, name) for name in names), *held], dtype=torch.int64)
        every = torch.empty(self._ranks, len(own), dtype=torch.int64)
        said = every[:, : len(names)]
        try:
            dist.all_gather(list(every.unbind()), own, group=self._group)
            if torch.equal(every, own.expand_as(every)):
                return
            if torch.equal(said, said[:1].expand_as(said)):
                self._refuse_unequal(every[:, len(names) :])
                return
            descriptions: list[Any] = [None] * self._ranks
            dist.all_gather_object(descriptions, describe(), group=self._group)
        except RuntimeError as error:
            if not is_connection(error):
                raise
            waiting = f"the other ranks, while this one {describe()}"
            raise self._lost(error, waiting) from error
        differs = said != said[0]
        column = int(differs.any(0).nonzero()[0])
        odd = tuple(differs[:, column].nonzero().flatten().tolist())
        what, late = names[column], names[column] == "before"
        states_inputs = what in ("call", "inputs")
        raise BatchesDiffer(
            step=self.steps - late,
            ranks=odd,
            what=_OF_PARTS.get(what, what) if parts else "values" if late else what,
            expected=descriptions[0] if states_inputs else "",
            got=descriptions[odd[0]] if states_inputs else "",
        )

    def _weights(self, call: str) -> Sequence[int]:
        return () if self._copies is None or call not in _WITH_WEIGHTS else self._copies.numbers()

    def _refuse_unequal(self, weights: torch.Tensor) -> None:
        """Raises BatchesDiffer (GA404) where ranks that hold the same weights give other digests.

        weights: int64 [ranks, NUMBERS].
        """
        ranks = unequal(weights.tolist())
        if ranks:
            raise BatchesDiffer(step=self.steps, ranks=ranks, what="weights")

    def _lost(self, error: RuntimeError, waiting_for: str) -> RankLost:
        rank = dist.get_rank()
        return RankLost(
            rank=rank,
            stage=None,
            lost=f"rank {1 - rank}" if self._ranks == 2 else "another rank",
            last_action=f"training step {self.steps}" if self.steps else "no training step yet",
            waiting_for=waiting_for,
            cause=cause_of(error),
        )


def _described(call: str, batch: Batch | None) -> str:
    """What a rank does, in words: `runs a training step on input_ids int64[8, 16], ...`."""
    if batch is None:
        return call
    parts = [
        f"{name} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else f"{name}={leaf.values[leaf.name] if isinstance(leaf, CallNumber) else leaf!r}"
        for name, leaf in zip(batch.names, batch.leaves, strict=True)
    ]
    return f"{call} on {', '.join(parts)}"
