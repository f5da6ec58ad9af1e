"""Checkpoints of several ranks: resumed bitwise, exported from parts, and errors on all alike."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import graphaccel
from graphaccel import errors
from tests.support.captures import captures_of
from tests.support.pool import Pool, WorkerError
from tests.support.small import Classifier, small_batch

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": 2, "microbatches": 2},
    "zero3": {"data": 2, "zero": 3},
}


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A classifier with dropout in float32, and its AdamW."""
    torch.manual_seed(seed)
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    losses = []
    for seed in range(first, first + 2):
        loss = model(*small_batch(seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@captures_of("checkpoints")
def _resume(kind: str, folder: str) -> tuple[list[float], list[float], list[str]]:
    model, optimizer = _model(0)
    given = {"devices": 2, "example_batch": small_batch(), **PLANS[kind]}
    graphaccel.optimize(model, optimizer, **given)
    _train(model, optimizer, 0)
    graphaccel.save(folder, model, optimizer, step=2, asynchronous=True)
    expected = _train(model, optimizer, 2)
    graphaccel.save(folder, model, optimizer, step=4)  # waits for the other

    other, other_optimizer = _model(5)
    graphaccel.optimize(other, other_optimizer, **given)
    step = f"{folder}/step-00000002"
    assert graphaccel.load(step, other, other_optimizer).step == 2
    got = _train(other, other_optimizer, 2)

    graphaccel.export(f"{folder}/weights", other, max_shard_bytes=300)
    expected_state = graphaccel.full_state_dict(other)
    fresh, _ = _model(9)
    graphaccel.optimize(fresh, devices=2, example_batch=small_batch(), **PLANS[kind])
    graphaccel.load(f"{folder}/weights", fresh)
    state = graphaccel.full_state_dict(fresh)
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())
    return expected, got, sorted(os.listdir(f"{folder}/weights"))


@pytest.mark.parametrize("kind", PLANS)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    for expected, got, files in pool.run(2, _resume, kind, str(tmp_path)):
        assert got == expected
        assert files[-1] == "model.safetensors.index.json"
        assert len(files) > 3
    model, optimizer = _model(1)  # a plain one, on one process
    assert graphaccel.load(tmp_path, model, optimizer).step == 4
    assert len(optimizer.state) == len(list(model.parameters()))


def _two(seed: int) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model and a critic, each with a plan of its own."""
    runs = [_model(seed), _model(seed + 1)]
    for (model, optimizer), zero in zip(runs, (1, 2), strict=True):
        pins: Any = {"data": 2, "zero": zero, "precision": "fp16"}
        graphaccel.optimize(model, optimizer, devices=2, example_batch=small_batch(), **pins)
    return runs


@captures_of("checkpoints")
def _resume_two(folder: str) -> tuple[list[list[float]], list[list[float]], list[Any]]:
    (model, optimizer), (critic, of_critic) = runs = _two(0)
    critic.graphaccel.session.scale.factor.fill_(4.0)
    for run in runs:
        _train(*run, 0)
    graphaccel.save(folder, model, optimizer, step=2, critic=critic, of_critic=of_critic)
    expected = [_train(*run, 2) for run in runs]
    (model, optimizer), (critic, of_critic) = runs = _two(5)
    graphaccel.load(folder, model, optimizer, critic=critic, of_critic=of_critic)
    scales = [model.graphaccel.loss_scale, critic.graphaccel.loss_scale]
    return expected, [_train(*run, 2) for run in runs], scales


def test_of_several_models_each_has_its_shards_and_its_loss_scale(
    pool: Pool, tmp_path: Path
) -> None:
    for expected, got, scales in pool.run(2, _resume_two, str(tmp_path)):
        assert got == expected
        assert scales[1] == 4.0 < scales[0]


def _train_while_saving(folder: str) -> tuple[int, str]:
    """Rank 0 has written its part before its next step, rank 1 writes after that step."""
    model, _ = _model(0)
    write = FileSystemWriter.write_data
    due = threading.Event()

    def write_in_turn(*arguments: Any) -> Any:
        if dist.get_rank() == 0:
            result = write(*arguments)
            due.set()
            return result
        assert due.wait(30)
        return write(*arguments)

    FileSystemWriter.write_data = write_in_turn  # type: ignore[method-assign]
    try:
        saved = graphaccel.save(folder, model, step=1, every=1, asynchronous=True)
        if dist.get_rank() == 0:
            assert due.wait(30)
        for step in range(2, 12):
            assert graphaccel.save(folder, model, step=step, every=100, asynchronous=True) is None
        due.set()
        assert saved is not None
        saved.wait()
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
    with pytest.raises(errors.GraphMisuse) as odd:
        graphaccel.save(folder, model, step=12, every=50 + dist.get_rank())
    return graphaccel.load(folder, model).step, str(odd.value)


def test_steps_go_on_while_the_ranks_write_at_different_times(pool: Pool, tmp_path: Path) -> None:
    for step, odd in pool.run(2, _train_while_saving, str(tmp_path), timeout_s=60):
        assert step == 1
        assert "rank 0 calls save() with every=50, and rank 1 with every=51" in odd


class _Place:
    """How far a rank has read rows of its own."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _with_own_values(folder: str) -> tuple[int, dict[str, Any]]:
    model, _ = _model(0)
    rank = dist.get_rank()
    place = _Place(100 + rank)
    seen = torch.tensor([rank])
    graphaccel.save(folder, model, step=1, place=place, seen=seen, epoch=4)
    again = _Place(0)
    more = graphaccel.load(folder, model, place=again).more
    return again.at, {"seen": int(more["seen"]), "epoch": more["epoch"]}


def test_what_each_rank_has_for_itself_is_restored_for_itself(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, (place, more) in enumerate(pool.run(2, _with_own_values, str(tmp_path))):
        assert (place, more) == (100 + rank, {"seen": rank, "epoch": 4})
    place = _Place(0)
    graphaccel.load(tmp_path, _model(0)[0], place=place)  # on one rank
    assert place.at == 100
    assert "seen, place of each of 2 ranks: here all continue from that of rank 0" in (
        capsys.readouterr().err
    )


def _raise(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_badly(folder: str, fail: Callable[..., None]) -> tuple[str, str, int]:
    """Rank 1 fails in its second save; then it saves other steps than rank 0."""
    model, optimizer = _model(0)
    graphaccel.save(folder, model, optimizer, step=1)
    write = FileSystemWriter.write_data
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(errors.CheckpointNotSaved) as failed:
            graphaccel.save(folder, model, optimizer, step=2)
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]
    with pytest.raises(errors.GraphMisuse) as odd:
        graphaccel.save(folder, model, optimizer, step=3 + dist.get_rank())
    return str(failed.value), str(odd.value), graphaccel.load(folder, model, optimizer).step


def test_an_error_on_one_rank_is_that_of_all(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, _save_badly, str(tmp_path), _raise)
    assert first == second
    assert "  rank 1: No space left on device\n" in first[0]
    assert f"newest complete checkpoint: {tmp_path}/step-00000001\n" in first[0]
    assert "rank 0 saves step 3" in first[1]
    assert "rank 1 step 4" in first[1]
    assert first[2] == 1


def test_a_rank_that_dies_in_a_save_leaves_the_last_checkpoint(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _save_badly, str(tmp_path), _die, timeout_s=20)
    assert caught.value.failures[1].kind == "died"
    assert caught.value.failures[0].kind == "RankLost"
    assert (tmp_path / "step-00000002").exists()  # half of it
    model, optimizer = _model(3)
    assert graphaccel.load(tmp_path, model, optimizer).step == 1


def _load_badly(folder: str) -> str:
    model, optimizer = _model(0)
    graphaccel.save(folder, model, optimizer, step=1)
    if dist.get_rank() == 1:
        path = Path(folder) / "step-00000001" / "random-00001.pt"
        content = path.read_bytes()
        path.write_bytes(b"\0" * len(content))
    dist.barrier()
    with pytest.raises(errors.CheckpointDamaged) as raised:
        graphaccel.load(folder, model, optimizer)
    return str(raised.value)


def test_a_file_that_one_rank_cannot_read_is_an_error_of_all(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, _load_badly, str(tmp_path))
    assert first == second
    assert "random-00001.pt` can not be loaded" in first
