"""A last batch of an epoch that a plan refuses is named after the first step, not at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from graphaccel.errors import BatchNotDivisible
from graphaccel.integrations.lightning import PlannedStrategy
from graphaccel.integrations.transformers import Trainer
from tests.integrations.test_trainer import arguments
from tests.support.pool import Pool

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

BATCH, ROWS, WIDTH = 4, 11, 3  # batches of 4, 4 and 3 rows
PLAN = {"data": 2}


class Regression(lightning.LightningModule):
    """Its loss is a plain mean: no row can be marked as ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self(*batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(-1))


def _by_trainer(folder: str, changed: dict[str, Any]) -> tuple[str, int]:
    """What is raised, and how many updates were made."""
    given = {
        "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1,
        "eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False,
    }  # fmt: skip
    trainer = Trainer(
        model=Regression(),
        args=arguments(folder, **given, **changed),
        train_dataset=[{"x": x, "labels": y} for x, y in rows()],  # pyright: ignore[reportArgumentType]
        optimize=PLAN,
    )
    try:
        trainer.train()
    except BatchNotDivisible as error:
        return str(error), trainer.state.global_step
    return "", trainer.state.global_step


@pytest.mark.parametrize(
    ("changed", "updates"),
    [
        ({"max_steps": -1, "num_train_epochs": 1}, 0),
        ({"max_steps": 3}, 0),
        ({"max_steps": 2}, 2),
        ({"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True}, 4),
    ],
)
def test_trainer(pool: Pool, tmp_path: Path, changed: dict[str, Any], updates: int) -> None:
    for text, done in pool.run(2, _by_trainer, str(tmp_path), changed):
        assert done == updates
        refused = "the last batch of each epoch, 3 rows, can not be cut into 2 equal parts"
        assert (refused in text) == (updates == 0)
        assert ("TrainingArguments(dataloader_drop_last=True)" in text) == (updates == 0)


def _by_lightning(changed: dict[str, Any], drop_last: bool) -> tuple[str, int]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        **{"max_epochs": 1, **changed},
        accelerator="cpu",
        devices=1,
        strategy=PlannedStrategy(devices=2, **PLAN),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Regression(), DataLoader(rows(), BATCH, drop_last=drop_last))
    except BatchNotDivisible as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize(
    ("changed", "drop_last", "updates"),
    [
        ({}, False, 0),
        ({"max_epochs": 2}, True, 4),
        ({"max_steps": 2}, False, 2),
        ({"limit_train_batches": 2}, False, 2),
    ],
)
def test_lightning(pool: Pool, changed: dict[str, Any], drop_last: bool, updates: int) -> None:
    for text, done in pool.run(2, _by_lightning, changed, drop_last):
        assert done == updates
        assert ("the last batch of each epoch, 3 rows" in text) == (updates == 0)
        assert ("DataLoader(dataset, batch_size=..., drop_last=True)" in text) == (updates == 0)
