"""The pool of workers: order of results, failures by rank, recovery."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.support.pool import Pool, WorkerError, uses_pool


def _sum_of_ranks(scale: float) -> tuple[int, torch.Tensor]:
    value = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(value)
    return dist.get_rank(), value


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("lost it")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _receive_what_nobody_sends() -> None:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def _fail_to_join_another_group_on(rank: int) -> str:
    if dist.get_rank() != rank:
        return ""
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="timeout") as caught:
        dist.init_process_group(
            "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=2,
            timeout=timedelta(seconds=0.1),
        )
    return str(caught.value)


def _wait_forever_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def _process_and_threads() -> tuple[int, int, str]:
    return os.getpid(), torch.get_num_threads(), os.environ["WORLD_SIZE"]


def _exit() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("world_size", [2, 3, 1])
def test_results_come_in_order_of_rank(pool: Pool, world_size: int) -> None:
    results = pool.run(world_size, _sum_of_ranks, 2.0)
    total = float(world_size * (world_size - 1))
    assert results == [(rank, torch.tensor([total])) for rank in range(world_size)]


def test_workers_stay_and_have_one_thread(pool: Pool) -> None:
    first = pool.run(2, _process_and_threads)
    assert pool.run(2, _process_and_threads) == first
    assert len({pid for pid, _, _ in first}) == 2
    assert {entry[1:] for entry in first} == {(1, "2")}


def test_an_exception_names_its_rank_and_line_first(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _raise_on, 1)
    rank, failure = next(iter(caught.value.failures.items()))
    assert (rank, failure.kind, failure.message) == (1, "KeyError", "'lost it'")
    assert "in _raise_on" in failure.text
    assert len(pool.run(2, _sum_of_ranks, 1.0)) == 2


def test_system_exit_is_a_failure_not_the_end_of_the_worker(pool: Pool) -> None:
    before = pool.run(1, _process_and_threads)
    with pytest.raises(WorkerError, match="rank 0: SystemExit: 3"):
        pool.run(1, _exit)
    assert pool.run(1, _process_and_threads) == before


def test_a_dead_worker_is_named_and_replaced(pool: Pool) -> None:
    before = pool.run(2, _process_and_threads)
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _die_on, 0)
    assert caught.value.failures[0].kind == "died"
    assert "exit code -9" in caught.value.failures[0].message
    after = pool.run(2, _process_and_threads)
    assert after[0][0] != before[0][0]


@pytest.mark.release
def test_a_deadlock_of_all_ranks_ends_at_the_timeout(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="Timed out") as caught:
        pool.run(2, _receive_what_nobody_sends, timeout_s=5.0)
    assert "in _receive_what_nobody_sends" in next(iter(caught.value.failures.values())).text
    assert len(pool.run(2, _sum_of_ranks, 1.0)) == 2


@pytest.mark.release
def test_a_hung_worker_is_named_with_its_stack_and_replaced() -> None:
    workers = Pool(timeout_s=5.0, grace_s=1.0)
    try:
        before = workers.run(2, _process_and_threads)
        with pytest.raises(WorkerError) as caught:
            workers.run(2, _wait_forever_on, 1)
        assert {rank: f.kind for rank, f in caught.value.failures.items()} == {1: "hung"}
        assert "in _wait_forever_on" in caught.value.failures[1].text
        after = workers.run(2, _process_and_threads)
    finally:
        workers.close()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_worker_whose_group_is_spoilt_is_replaced(pool: Pool) -> None:
    before = pool.run(2, _process_and_threads)
    assert "timeout" in pool.run(2, _fail_to_join_another_group_on, 1)[1]
    after = pool.run(2, _process_and_threads)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_world_size_out_of_range_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="1 to 8, not 9"):
        pool.run(9, _process_and_threads)


def test_files_that_use_the_pool_are_known() -> None:
    tests = Path(__file__).parents[1]
    assert uses_pool(Path(__file__))
    assert uses_pool(tests / "examples" / "test_nanogpt.py")
    assert not uses_pool(tests / "support" / "test_cases.py")
