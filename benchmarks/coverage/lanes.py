"""Runs entries in worker processes that may crash or hang, several at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.coverage.judge import judge, ranks_of, together
from tests.support.pool import PRELOADED, Pool, WorkerError

LIMIT_S = 60.0
"""Processor seconds of one entry under one setting beyond which it is a finding."""
_WALL_S = 10 * LIMIT_S
DECLARED = "benchmarks.coverage.declared"
"""Imported first: transformers imports torchvision where it is installed."""

Task = tuple[str, str, tuple[str, ...]]


def run(tasks: Sequence[Task], lanes: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(part, name, setting, verdict) of every setting of every task, as they are found.

    A lane has two worker processes, and takes one entry after the other.
    """
    waiting: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[str, str, str, dict[str, Any]] | None] = queue.SimpleQueue()
    for task in (*tasks, *[None] * lanes):
        waiting.put(task)

    def work() -> None:
        pool = Pool(timeout_s=_WALL_S, preloaded=(DECLARED, *PRELOADED))
        try:
            while (task := waiting.get()) is not None:
                part, name, settings = task
                for setting in settings:
                    found.put((part, name, setting, _verdict(pool, part, name, setting)))
        finally:
            pool.close()
            found.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < lanes:
        one = found.get()
        if one is None:
            ended += 1
        else:
            yield one


def _verdict(pool: Pool, part: str, name: str, setting: str) -> dict[str, Any]:
    try:
        verdict = together(pool.run(ranks_of(setting), judge, part, name, setting))
    except WorkerError as error:
        first = next(iter(error.failures.values()))
        if first.kind == "hung":
            return {"outcome": "slow", "detail": f"no answer within {_WALL_S:g} s"}
        return {"outcome": "raw", "detail": f"{first.kind}: {first.message}"[:200]}
    if verdict["seconds"] > LIMIT_S:
        said = f"{verdict['outcome']}, after {verdict['seconds']:.0f} s of the processor"
        verdict |= {"outcome": "slow", "detail": said}
    return verdict
