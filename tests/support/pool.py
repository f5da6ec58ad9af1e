"""Worker processes for tests that need several ranks: started once, used by every such test.

Importing torch takes seconds, so the workers are forked from a server process that has imported it
and stay alive between jobs. Each job gets a fresh gloo process group on this machine. A worker
that dies or hangs is reported with its rank and its stack, and replaced for the next job.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MOST_WORKERS = 8
START_LIMIT_S = 300.0
_GROWN_KIB = 2**18
_GROUP_THREADS = 6
# What jobs import, once for all of them; transformers loads a model's module when it is asked for.
_MODELS = ("bart", "bert", "gpt2", "llama", "mixtral", "resnet", "swin", "t5", "vit")
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.export",
    "torch.fx._graph_pickler",
    "transformers",
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
    "graphaccel.api",
)


@cache
def uses_pool(file: Path) -> bool:
    """Whether a file has tests that run in the pool, by themselves or by `run_ranks`."""
    return re.search(r"\bpool: Pool\b|\brun_ranks\b", file.read_text()) is not None


@dataclass(frozen=True)
class Failure:
    """Why one rank gave no result.

    `kind` is the exception's class name, "died" (the process ended) or "hung" (it did not answer in
    time and was ended); `text` the traceback, or the stacks of all threads at the end.
    """

    kind: str
    message: str
    text: str


class WorkerError(RuntimeError):
    """At least one rank failed. `failures` is by rank, in the order in which they were seen.

    The first is the likely cause: when one rank stops, the connections of the others break.
    """

    def __init__(self, failures: Mapping[int, Failure]) -> None:
        self.failures = dict(failures)
        parts = [
            f"rank {rank}: {failure.kind}: {failure.message}\n{failure.text}"
            for rank, failure in self.failures.items()
        ]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: connection.Connection
    log: Path


class Pool:
    """Up to eight worker processes; `run` starts those it lacks.

    `timeout_s` limits every collective of a job. A rank that has not answered `grace_s` after that,
    or `grace_s` after another rank failed, is hung.
    """

    def __init__(
        self,
        timeout_s: float = 300.0,
        grace_s: float = 5.0,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        self._workers: list[_Worker] = []
        self._started = 0
        self._jobs = 0

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """`function(*args)` on every rank of a fresh gloo group; the results in order of rank.

        `function` must be importable by name; arguments and results travel pickled, tensors by
        value; `timeout_s` is for this job only. Raises WorkerError if a rank raised, died or hung.
        """
        if not 1 <= world_size <= MOST_WORKERS:
            raise ValueError(f"world_size must be 1 to {MOST_WORKERS}, not {world_size}")
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store-{self._jobs}")
        jobs = [
            pickle.dumps(_Job(function, args, rank, world_size, store, limit))
            for rank in range(world_size)
        ]
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        for worker, job in zip(self._workers, jobs, strict=False):
            worker.pipe.send_bytes(job)
        results, failures = self._collect(world_size, limit)
        if failures:
            raise WorkerError(failures)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(self._grace_s)
            worker.process.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _collect(self, world_size: int, limit: float) -> tuple[dict[int, Any], dict[int, Failure]]:
        """Wait for the answers of ranks 0..world_size-1; replace workers that give none."""
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        waiting = {self._workers[rank].pipe: rank for rank in range(world_size)}
        deadline = time.monotonic() + limit + self._grace_s
        while waiting:
            remaining = max(0.0, deadline - time.monotonic())
            ready = set(connection.wait(list(waiting), remaining))
            if not ready:
                for rank in waiting.values():
                    end = self._end(rank, "hung", f"no answer within {limit:g} s")
                    failures.setdefault(rank, end)
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting[pipe]
                try:
                    answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    del waiting[pipe]
                    end = self._end(rank, "died", "the process ended")
                    failures.setdefault(rank, end)
                    answer = None
                if isinstance(answer, Failure):
                    failures[rank] = answer
                elif isinstance(answer, _Result):
                    results[rank] = answer.value
                elif isinstance(answer, _Idle):
                    del waiting[pipe]
                    if answer.spoilt:
                        self._replace(rank)
            if failures:  # the others can only wait for the failed one
                deadline = min(deadline, time.monotonic() + self._grace_s)
        return results, failures

    def _start(self) -> _Worker:
        self._started += 1
        log = Path(self._folder.name) / f"worker-{self._started}.txt"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, str(log)), daemon=True)
        process.start()
        theirs.close()
        # The first start imports torch: that time is no part of a job's limit.
        if not ours.poll(START_LIMIT_S):
            raise RuntimeError(f"a worker did not start within {START_LIMIT_S:g} s")
        ours.recv_bytes()
        return _Worker(process, ours, log)

    def _end(self, rank: int, kind: str, message: str) -> Failure:
        """Replace the worker of `rank`, which died or must, and say what it was doing."""
        worker = self._workers[rank]
        if kind == "hung" and worker.process.pid is not None:
            os.kill(worker.process.pid, signal.SIGABRT)  # faulthandler writes the stacks to the log
        self._replace(rank)
        text = worker.log.read_text() if worker.log.exists() else ""
        return Failure(kind, f"{message} (exit code {worker.process.exitcode})", text)

    def _replace(self, rank: int) -> None:
        worker = self._workers[rank]
        worker.process.join(self._grace_s)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self._workers[rank] = self._start()


@dataclass(frozen=True)
class _Result:
    value: Any


@dataclass(frozen=True)
class _Idle:
    """The worker has started, or has left the group of the last job: it takes the next one.

    Not if it is `spoilt`: then it ends.
    """

    spoilt: bool = False


def _serve(pipe: connection.Connection, log: str) -> None:
    """The life of a worker: jobs from the pipe until it closes."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    # A deprecated collective would warn every user, once a rank.
    warnings.filterwarnings("error", message=r"`torch\.distributed", category=FutureWarning)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gc.freeze()  # what the imports left is never garbage; keeps the collection after each job short
    gc.disable()  # jobs are short: one collection after each, none of what a capture builds
    with open(log, "w") as stacks:
        faulthandler.enable(stacks, all_threads=True)
        pipe.send_bytes(pickle.dumps(_Idle()))
        most = 0
        while True:
            try:
                job: _Job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(_answer(job))
            idle = _Idle(spoilt=not dist.is_initialized())
            if not idle.spoilt:
                dist.destroy_process_group()
                most = collect(most)
                gc.disable()  # a job may have enabled it
            pipe.send_bytes(pickle.dumps(idle))
            if idle.spoilt:
                # Joining a group failed, or the job left it. torch counts the groups it tried to
                # make and puts the count in its keys, so this process may from now on look
                # for its peers under another name than they for it.
                return


def collect(most: int) -> int:
    """Collect garbage, but among what earlier calls left only where this process has grown; what is
    left is kept for later and not looked at again. most: the result of the last call, the largest
    memory of the process at a collection of all, in KiB.

    After every job: the peers of a process see that it has left when its process groups are freed.
    """
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = now > most + _GROWN_KIB
    if grown:
        gc.unfreeze()
        most = now
    # Where a job has unfrozen what earlier ones left, that is the oldest generation.
    gc.collect(2 if grown or gc.get_freeze_count() else 1)
    if _group_threads() > _GROUP_THREADS:
        gc.unfreeze()
        gc.collect()
    gc.freeze()
    return most


def _group_threads() -> int:
    """How many threads this process has for process groups: those that only garbage holds wake up a
    hundred times a second, each."""
    tasks, count = Path("/proc/self/task"), 0
    for task in tasks.iterdir() if tasks.is_dir() else ():
        with suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text().startswith("gloo")
    return count


def _answer(job: _Job) -> bytes:
    """Join the job's group, run its function, and pickle the result or the failure."""
    try:
        _join_group(job)
        return pickle.dumps(_Result(job.function(*job.args)))
    except BaseException as error:  # SystemExit of a script under test is an answer too
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(Failure(type(error).__name__, str(error), text))


def _join_group(job: _Job) -> None:
    import torch
    from torch import distributed as dist

    torch.manual_seed(0)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        # Ranks make the same programs: one of them checks the graphs after each pass.
        GRAPHACCEL_VERIFY=str(int(job.rank == 0)),
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_s),
    )
    # Ranks finish connecting at different times. One whose job is short could else close its
    # connections while another is still making them.
    dist.barrier()
