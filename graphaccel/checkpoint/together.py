"""Runs a part of a save or load on the ranks of a job, so that all of them fail alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from graphaccel.errors import GraphAccelError, GraphMisuse, RankLost
from graphaccel.runtime.execution.lost_rank import first_line, is_connection

T = TypeVar("T")
Failed = Callable[[int, str], GraphAccelError]
"""The error for what a rank failed with: (rank, the failure in words) → error."""


@dataclass(frozen=True)
class Together:
    """The ranks that save or load a model together, over a gloo group of their own."""

    rank: int = 0
    ranks: int = 1
    group: Any = None

    def each(self, action: Callable[[], T], failed: Failed) -> list[T]:
        """Run `action` on every rank; the results in the order of the ranks.

        Raises the error of the first rank that failed, on all ranks: its own GraphAccelError, or
        `failed` of an OSError, RuntimeError or ValueError.
        """
        result: tuple[T | None, GraphAccelError | None]
        try:
            result = action(), None
        except GraphAccelError as error:
            result = None, error
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            result = None, failed(self.rank, in_words(error))
        results: list[Any] = [result]
        if self.ranks > 1:
            results = [None] * self.ranks
            self.collective(lambda: dist.all_gather_object(results, result, group=self.group))
        errors = {rank: error for rank, (_, error) in enumerate(results) if error is not None}
        if errors:
            first = min(errors)
            own = result[1] if first == self.rank else None  # this one still has its cause
            raise own or errors[first]
        return [value for value, _ in results]

    def here(self, action: Callable[[], T], failed: Failed) -> T:
        """Run `action` on every rank; this rank's result. Raises as `each` does."""
        built: list[T] = []
        self.each(lambda: built.append(action()), failed)
        return built[0]

    def first(self, action: Callable[[], T], failed: Failed) -> T:
        """Run `action` on rank 0; its result on every rank. Raises as `each` does."""
        return self.each(lambda: action() if self.rank == 0 else None, failed)[0]  # type: ignore

    def collective(self, action: Callable[[], T], failed: Failed | None = None) -> T:
        """Run a collective of torch.distributed.checkpoint, or another one.

        Raises `failed` of what some rank reported to all, RankLost (GA501) if one does not answer,
        GraphMisuse (GA407) where the script destroyed its process groups meanwhile. What ends this
        process (KeyboardInterrupt, SystemExit) stays what it is.
        """
        try:
            return action()
        except (CheckpointException, RuntimeError, ValueError) as error:
            if self.ranks > 1 and not dist.is_initialized():
                raise GraphMisuse(
                    what="the process group was destroyed before a checkpoint was written",
                    help_line="saved = graphaccel.save(...); saved.wait(); "
                    "torch.distributed.destroy_process_group()",
                ) from None
            meant = self._meant(error, failed)
            if meant is error:
                raise
            raise meant from (error if isinstance(meant, RankLost) else None)

    def _meant(self, error: BaseException, failed: Failed | None) -> BaseException:
        """The error to raise for that of a collective."""
        if isinstance(error, CheckpointException):
            own, _ = error.failures.get(self.rank, (None, None))
            # Ctrl-C, or sys.exit() in a handler of the script's
            if own is not None and not isinstance(own, Exception):
                return own
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            if isinstance(cause, GraphAccelError):
                return cause
            return error if failed is None else failed(rank, in_words(cause))
        if not isinstance(error, RuntimeError) or not is_connection(error):
            return error
        lost = f"rank {1 - self.rank}" if self.ranks == 2 else "another rank"
        return RankLost(
            rank=self.rank,
            stage=None,
            lost=lost,
            last_action="a part of a checkpoint",
            waiting_for="the same part of all ranks",
            cause=first_line(error),
        )


def ranks_of(model: nn.Module) -> Together:
    """The ranks that call `save` or `load` for this model. Collective: it makes a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Together()
    seconds = getattr(getattr(model, "graphaccel", None), "timeout", None)
    timeout = None if seconds is None else timedelta(seconds=seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    return Together(dist.get_rank(), dist.get_world_size(), group)


def in_words(error: BaseException) -> str:
    """An error in one line, such as `No space left on device: 'checkpoints/step-00000002'`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename!r}" if error.filename else "")
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
