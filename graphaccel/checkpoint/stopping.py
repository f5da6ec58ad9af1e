"""Ends a run that is asked to stop, by SIGTERM: schedulers send it before they take a machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from graphaccel.checkpoint.together import Together
from graphaccel.errors import GraphMisuse
from graphaccel.runtime.launch import STOPPED, STOPPED_FILE


class StopRequest:
    """Whether this process was asked to stop, from its first `save(every=...)` on."""

    def __init__(self) -> None:
        self.seen = False
        self._watching = False

    def watch(self) -> None:
        """Note a SIGTERM instead of ending by it. Another handler of the script still runs."""
        if self._watching or threading.current_thread() is not threading.main_thread():
            return
        self._watching = True
        before = signal.getsignal(signal.SIGTERM)

        def asked(number: int, frame: Any) -> None:
            self.seen = True
            if callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, asked)

    def on_any(self, together: Together, step: int, every: int) -> bool:
        """Whether some rank was asked to stop. Collective.

        Raises GraphMisuse (GA407) on every rank where they are at different steps, or save after
        other numbers of steps.
        """
        if together.ranks == 1:
            return self.seen
        mine = torch.tensor([int(self.seen), step, every])
        results = [torch.empty_like(mine) for _ in range(together.ranks)]
        together.collective(lambda: dist.all_gather(results, mine, group=together.group))
        for name, place in (("step", 1), ("every", 2)):
            others = [int(one[place]) for one in results]
            if len(set(others)) > 1:
                odd = next(rank for rank, other in enumerate(others) if other != others[0])
                raise GraphMisuse(
                    what=f"rank 0 calls save() with {name}={others[0]}, and rank {odd} with "
                    f"{name}={others[odd]}",
                    help_line="call save() in the same steps on every rank, with the same every",
                )
        return any(int(one[0]) for one in results)


def end_stopped(step: int, folder: Path, rank: int) -> NoReturn:
    """End this process after its checkpoint was saved.

    The exit code is 75 (EX_TEMPFAIL: start it once more), of `graphaccel run` too, which does not
    restart a rank that ends so.
    """
    if rank == 0:
        print(
            f"graphaccel: asked to stop: step {step} is saved in {folder}; exit code {STOPPED}",
            file=sys.stderr,
        )
    if threading.current_thread() is threading.main_thread():
        # Another rank may have been asked first: what arrives while Python ends would end this one
        # by the signal, and have the launcher start all of them again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file_name = os.environ.get(STOPPED_FILE)
    if file_name is None:
        sys.exit(STOPPED)
    Path(file_name).touch()
    sys.exit(0)  # the launcher has the exit code; another one would make it restart the ranks
