"""What goes wrong between ranks: a rank that dies or hangs, other batches, modes, and too many stages."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import graphaccel
from graphaccel import errors
from graphaccel.runtime.execution.executor import Executor
from graphaccel.schedule.table import Action
from tests.compiler.test_input_checks import Words
from tests.support.captures import captures_of
from tests.support.pool import Failure, Pool, WorkerError
from tests.support.small import Classifier, small_batch, used_optimizer
from tests.support.untouched import refused

pytestmark = pytest.mark.multiprocess

PIPELINE = {"pipeline": 2, "microbatches": 4}
TIMEOUT = 10.0


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    threading.Event().wait()


@captures_of("failures")
def _train_until(fail: Callable[[], None], pins: dict[str, Any], at: int, timeout: float) -> None:
    """Rank 1 fails before its computation number `at` (forwards and backwards of all steps)."""
    compute, count = Executor.run_action, 0

    def counted(self: Executor, action: Action, state: Any) -> None:
        nonlocal count
        if count == at and dist.get_rank() == 1:
            fail()
        count += 1
        compute(self, action, state)

    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=2, timeout=timeout, **pins)
    Executor.run_action = counted  # type: ignore[method-assign]
    try:
        for _ in range(6):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        Executor.run_action = compute  # type: ignore[method-assign]


def _failures(
    pool: Pool, fail: Callable[[], None], pins: dict[str, Any], at: int, timeout: float
) -> tuple[dict[int, Failure], float]:
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _train_until, fail, pins, at, timeout, timeout_s=60.0)
    return caught.value.failures, time.monotonic() - start


def _lost(lost: str, message: str, modules: Collection[str]) -> None:
    """The text of GA501 but for what the backend reported. modules: one of them is named."""
    lines = message.splitlines()
    assert lines[0] == f"error[GA501]: {lost}"
    label, _, module = lines.pop(3).partition(":")
    assert label == "  in module"
    assert module.strip() in modules
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "last action done",
        "waiting for",
        "reported",
        "why",
        "help",
        "help",
        "explain",
    ]


def _rows(message: str) -> tuple[str, str]:
    done, waiting = message.splitlines()[1:3]
    return done.partition(":")[2].strip(), waiting.partition(":")[2].strip()


def test_a_rank_of_a_pipeline_dies_in_a_step(pool: Pool) -> None:
    failures, seconds = _failures(pool, _die, PIPELINE, 8 * 4 + 3, TIMEOUT)
    assert failures[1].kind == "died"
    assert failures[0].kind == "RankLost"
    _lost("rank 0 (stage 0) lost rank 1 (stage 1)", failures[0].message, ("inner", "out"))
    done, waiting = _rows(failures[0].message)
    assert "microbatch" in done
    assert "microbatch" in waiting
    assert seconds < 40


def test_a_data_rank_dies_in_a_step(pool: Pool) -> None:
    failures, seconds = _failures(pool, _die, {"data": 2, "microbatches": 2}, 4 * 4 + 1, TIMEOUT)
    assert failures[1].kind == "died"
    assert failures[0].kind == "RankLost"
    _lost("rank 0 lost rank 1", failures[0].message, ("out, inner",))
    assert seconds < 40


@pytest.mark.parametrize("pins", [PIPELINE, {"data": 2}], ids=["pipeline", "data"])
def test_a_rank_that_does_not_answer_is_given_up(pool: Pool, pins: dict[str, Any]) -> None:
    at = 8 * 4 + 3 if "pipeline" in pins else 4 * 2
    failures, seconds = _failures(pool, _hang, pins, at, 3.0)
    assert failures[1].kind == "hung"
    assert failures[0].kind == "RankLost"
    stages = (" (stage 0)", " (stage 1)") if "pipeline" in pins else ("", "")
    modules = ("inner", "out") if "pipeline" in pins else ("out, inner",)
    _lost(f"rank 0{stages[0]} lost rank 1{stages[1]}", failures[0].message, modules)
    assert seconds < 40


# --- refused alike on every rank ------------------------------------------------------------------


def _other_batches() -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=2, data=2, example_batch=small_batch())
    text = """\
error[GA404]: at step 0 the batch of rank 1 differs from rank 0's
  why:  every rank is given the global batch and takes its own part of it
  help: seed the shuffling alike on every rank:  torch.manual_seed(0)
  help: and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., shuffle=True)
  help: or keep the sampler, and say that each rank reads its own rows:  optimize(..., batch="local")
  explain: graphaccel explain GA404"""
    with refused(errors.BatchesDiffer, text, model, optimizer):
        model(*small_batch(seed=dist.get_rank()))
    model(*small_batch()).backward()  # and it goes on


def test_ranks_with_other_batches(pool: Pool) -> None:
    pool.run(2, _other_batches)


def _uncut(rows: int, pins: dict[str, Any], parts: str, allowed: str) -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    text = f"""\
error[GA206]: a batch of {rows} can not be cut into {parts}
  why:  microbatches of different sizes would change the loss
  help: {allowed}
  help: or leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  explain: graphaccel explain GA206"""
    with refused(errors.BatchNotDivisible, text, model, optimizer):
        graphaccel.optimize(model, optimizer, devices=2, example_batch=small_batch(rows), **pins)


@pytest.mark.parametrize(
    ("rows", "pins", "parts", "allowed"),
    [
        (
            9,
            {"data": 2},
            "2 equal parts (1 microbatches x data 2)",
            "use a batch that is a multiple of 2",
        ),
        (
            12,
            {"data": 2, "microbatches": 4},
            "8 equal parts (4 microbatches x data 2)",
            "with data=2 use microbatches= one of:  1, 2, 3, 6",
        ),
    ],
)
def test_a_batch_that_can_not_be_cut(
    pool: Pool, rows: int, pins: dict[str, Any], parts: str, allowed: str
) -> None:
    pool.run(2, _uncut, rows, pins, parts, allowed)


def _too_many_stages() -> None:
    model, batch = torch.nn.Linear(8, 1), (torch.ones(8, 8),)
    optimizer = used_optimizer(model)
    text = """\
error[GA203]: the graph can not be cut into 2 stages; 1 is the most
  why:  every stage needs at least one parameter and one op of its own
  help: use at most:  pipeline=1
  explain: graphaccel explain GA203"""
    with refused(errors.TooManyStages, text, model, optimizer):
        graphaccel.optimize(
            model, optimizer, devices=2, pipeline=2, example_batch=batch, loss_fn=_mean
        )


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_more_stages_than_the_graph_has(pool: Pool) -> None:
    pool.run(2, _too_many_stages)


def _contradiction() -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    text = """\
error[GA210]: data=2 and pipeline=2 can not be kept together on 2 devices
  data=2      with the others:  data=1
  pipeline=2  with the others:  pipeline=1
  why:  data 2 x pipeline 2 is 4, not 2 devices
  help: leave one of them out, and it will be chosen for you:  data, pipeline
  explain: graphaccel explain GA210"""
    with refused(errors.ConflictingPins, text, model, optimizer):
        graphaccel.optimize(
            model, optimizer, devices=2, data=2, pipeline=2, example_batch=small_batch()
        )


def test_contradictory_pins(pool: Pool) -> None:
    pool.run(2, _contradiction)


def _evaluation_with_gradients() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=2, example_batch=batch, **PIPELINE)
    model.eval()
    text = """\
error[GA407]: a forward in evaluation mode with gradients enabled, under a pipeline
  help: to evaluate:  with torch.no_grad(): output = model(batch)
  help: to train with dropout off and batch statistics fixed:  model.eval(); model.training = True
  explain: graphaccel explain GA407"""
    with refused(errors.GraphMisuse, text, model, optimizer):
        model(*batch)
    model.training = True
    model(*batch).backward()
    model.training = False
    with torch.no_grad():
        assert model(*batch).item() > 0


def test_evaluation_mode_with_gradients(pool: Pool) -> None:
    pool.run(2, _evaluation_with_gradients)


def _another_world() -> None:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    text = """\
error[GA407]: devices=4, but the launcher started 2 processes
  help: leave devices out, or start 4:  graphaccel run --devices 4 train.py
  explain: graphaccel explain GA407"""
    started_with, sys.argv = sys.argv, ["train.py"]
    try:
        with refused(errors.GraphMisuse, text, model, optimizer):
            graphaccel.optimize(model, optimizer, devices=4)
    finally:
        sys.argv = started_with


def test_devices_unlike_the_launchers(pool: Pool) -> None:
    pool.run(2, _another_world)


def _beyond_a_table() -> None:
    model = Words()
    graphaccel.optimize(model, devices=2, pipeline=2, microbatches=2, check="off")
    good = torch.arange(8).repeat(4, 1)
    losses = []
    for ids in (good, good + 3, torch.zeros(4, 9, dtype=torch.int64), good):
        try:
            losses.append(float(model(ids).detach()))
        except errors.GraphMisuse as error:
            losses.append(str(error).splitlines()[0])
    assert losses[1].startswith("error[GA407]: `args[0]` holds 10, and `words.weight`")
    assert losses[2].startswith("error[GA407]: a sequence of this batch has the position 8, and")
    assert losses[3] == losses[0]


def test_an_index_beyond_a_table_is_refused_on_every_rank(pool: Pool) -> None:
    pool.run(2, _beyond_a_table)


def _raise_index() -> None:
    torch.nn.functional.embedding(torch.tensor([7]), torch.zeros(5, 2))


@pytest.mark.parametrize("pins", [PIPELINE, {"data": 2}], ids=["pipeline", "data"])
def test_what_one_rank_raises_in_a_step_is_told_by_all(pool: Pool, pins: dict[str, Any]) -> None:
    failures, seconds = _failures(pool, _raise_index, pins, 3, TIMEOUT)
    assert failures[1].kind == "IndexError"
    assert failures[0].kind == "RankLost"
    reported = "  reported:          rank 1 raised IndexError: index out of range in self"
    assert reported in failures[0].message.splitlines()
    assert seconds < 40


class _Position:
    def state_dict(self) -> dict[str, int]:
        if dist.get_rank() == 1:
            raise ValueError("no position")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def _cause(folder: str) -> tuple[str, str]:
    with pytest.raises(errors.GraphMisuse) as raised:
        graphaccel.save(folder, Classifier(), step=1, data=_Position())
    return raised.value.what, type(raised.value.__cause__).__name__


def test_a_rank_that_fails_in_a_save_shows_its_own_line(pool: Pool, tmp_path: Path) -> None:
    """All ranks raise its error; its own has the cause, with the traceback."""
    what = "`data.state_dict()` raised ValueError: no position"
    assert pool.run(2, _cause, str(tmp_path)) == [(what, "NoneType"), (what, "ValueError")]
