"""What ranks read and wait for, to which Accelerate and Trainer say that each is alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.tracking import GeneralTracker

from graphaccel.integrations.accelerate import Accelerator
from graphaccel.integrations.transformers import Trainer
from tests.integrations.test_trainer import GPT2, Lines, apart, arguments, gpt2
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]


class Stream(torch.utils.data.IterableDataset):
    """Lines whose number nobody knows."""

    def __init__(self, count: int) -> None:
        self.lines = Lines(count, seed=1)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from (self.lines[row] for row in range(len(self.lines)))


def _streamed(kind: type, folder: str, **more: Any) -> list[dict[str, Any]]:
    changed = {"max_steps": 5, "save_strategy": "no", "load_best_model_at_end": False}
    trainer = kind(
        model=gpt2(),
        args=arguments(folder, **changed),
        train_dataset=Stream(44),
        eval_dataset=Stream(13),
        **more,
    )
    trainer.train()
    kept = ("loss", "grad_norm", "eval_loss")
    history = [{k: row[k] for k in kept if k in row} for row in trainer.state.log_history]
    return [row for row in history if row]


@captures_of(GPT2)
def _planned(folder: str) -> list[dict[str, Any]]:
    return _streamed(Trainer, folder, optimize={"data": 2})


def test_a_data_set_without_a_length(pool: Pool, tmp_path: Path) -> None:
    """It begins anew in the middle of an accumulated update, and ends with 4 and with 5 rows."""
    expected = _streamed(transformers.Trainer, f"{tmp_path}/plain")
    assert len(expected) == 8  # 5 updates, 3 evaluations
    for found in pool.run(2, _planned, f"{tmp_path}/planned", timeout_s=120):
        assert apart(expected, found) < 1e-6


def _mean_of_rows(accelerator: Any) -> float:
    """A loss over all rows, as scripts of Accelerate's examples compute it."""
    loader = accelerator.prepare(torch.utils.data.DataLoader(Stream(6), batch_size=4))
    means = [batch["input_ids"].float().mean() for batch in loader]
    assert len(means) == 2
    rows = []
    for batch in loader:
        rows.append(accelerator.gather_for_metrics(batch["input_ids"].float().mean().repeat(4)))
    return float(torch.cat(rows).mean())


def test_the_last_batch_of_a_stream_counts_its_rows() -> None:
    expected = _mean_of_rows(accelerate.Accelerator(cpu=True))
    assert expected == pytest.approx(float(Lines(6, seed=1).ids.float().mean()))
    assert _mean_of_rows(Accelerator(optimize={"devices": 1})) == expected


def _together(folder: str) -> list[Any]:
    accelerator = Accelerator(optimize={"devices": 2})
    loader = accelerator.prepare(torch.utils.data.DataLoader(Stream(6), batch_size=4))
    rows = [batch["input_ids"].tolist() for batch in loader]
    file, first = Path(folder, "prepared"), accelerator.is_main_process
    with accelerator.main_process_first():
        seen = file.exists()
        if first:
            time.sleep(0.5)
            file.write_text("")
    if not first:
        time.sleep(0.5)
        file.unlink()
    accelerator.wait_for_everyone()
    return [rows, seen, file.exists()]


def test_the_first_rank_goes_first_and_all_are_waited_for(pool: Pool, tmp_path: Path) -> None:
    (rows, *first), (same, *second) = pool.run(2, _together, str(tmp_path), timeout_s=60)
    assert [len(batch) for batch in rows] == [4, 2]
    assert rows == same
    assert (first, second) == ([False, False], [True, False])


class _Kept(GeneralTracker):
    """A tracker that keeps what it gets."""

    name, requires_logging_directory = "kept", False

    def __init__(self) -> None:
        self.tracker: list[Any] = []
        super().__init__()

    def store_init_configuration(self, values: dict) -> None:
        self.tracker.append(values)

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.tracker.append((step, values))


def _tracked() -> tuple[list[Any], list[str]]:
    kept, ran = _Kept(), []
    accelerator = Accelerator(optimize={"devices": 2}, log_with=kept)
    accelerator.init_trackers("run", config={"rate": 0.1})
    accelerator.log({"loss": 2.0}, step=1)
    accelerator.get_tracker("kept").log({"loss": 1.0}, step=2)
    accelerator.on_main_process(ran.append)("main")
    accelerator.on_local_main_process(ran.append)("local")
    return kept.tracker, ran


def test_the_first_rank_alone_has_trackers(pool: Pool) -> None:
    logged = [{"rate": 0.1}, (1, {"loss": 2.0}), (2, {"loss": 1.0})]
    assert pool.run(2, _tracked, timeout_s=60) == [(logged, ["main", "local"]), ([], [])]


def _written(folder: str) -> bool:
    accelerator = Accelerator(optimize={"devices": 2})
    model = torch.nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if accelerator.is_main_process:
        time.sleep(0.5)  # what the first rank writes takes its time
    accelerator.save_model(model, folder)
    return Path(folder, "model.safetensors").is_file()


def test_what_the_first_rank_writes_is_there_for_all(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _written, f"{tmp_path}/model", timeout_s=60) == [True, True]
