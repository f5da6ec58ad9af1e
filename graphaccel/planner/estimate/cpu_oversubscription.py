"""Step time where more processes compute at the same time than there are cores.

The system gives every process that computes an equal share of the cores (processor sharing:
Kleinrock, Queueing Systems II, 1976, §4.4; Linux's fair scheduler comes close). A process that
waits for a message leaves its share to the others, so that a step takes longer than all work on all
cores, and longer than the schedule with a core for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from graphaccel.schedule.table import Kind, build

_KINDS: tuple[Kind, ...] = ("forward", "backward", "weight")
_DONE = 1e-9  # of the longest action: what is left when several end at the same time


def shared_makespan(
    shape: tuple[str, int, int, int],
    seconds: tuple[Sequence[float], Sequence[float], Sequence[float]],
    edges: Iterable[tuple[int, int, str]],
    processes: int,
    cores: float,
) -> float:
    """Seconds until the last rank has computed its last action; messages take no time.

    shape: name of the table, ranks, stages of a rank, microbatches. seconds: of forward, backward
    and weight on a core of their own, per stage. edges: messages, by (source stage, destination
    stage, "forward" or "backward"). alike: number of processes that do the work of each rank at the
    same time.

    Raises ValueError when the table deadlocks.
    """
    name, ranks, per_rank, microbatches = shape
    rows = build(name, ranks, per_rank, microbatches)
    took: dict[Kind, Sequence[float]] = dict(zip(_KINDS, seconds, strict=True))
    needs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for source, destination, way in edges:
        if source % ranks != destination % ranks:
            needs[way, destination].append(source)
    done: set[tuple[str, int, int]] = set()
    at = [0] * ranks
    left = [took[row[0].kind][row[0].stage] for row in rows]
    least = _DONE * max(max(each, default=0.0) for each in seconds)
    now = 0.0

    def ready(rank: int) -> bool:
        if at[rank] == len(rows[rank]):
            return False
        action = rows[rank][at[rank]]
        sources = needs.get((action.kind, action.stage), ())
        return all((action.kind, source, action.microbatch) in done for source in sources)

    while active := [rank for rank in range(ranks) if ready(rank)]:
        rate = min(1.0, cores / (processes * len(active)))
        next_end = min(left[rank] for rank in active)
        now += next_end / rate
        for rank in active:
            left[rank] -= next_end
            if left[rank] > least:
                continue
            action = rows[rank][at[rank]]
            done.add((action.kind, action.stage, action.microbatch))
            at[rank] += 1
            if at[rank] < len(rows[rank]):
                action = rows[rank][at[rank]]
                left[rank] = took[action.kind][action.stage]
    if any(at[rank] < len(rows[rank]) for rank in range(ranks)):
        raise ValueError("deadlock: ranks wait for ever")
    return now
