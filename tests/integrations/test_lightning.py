"""Lightning's Trainer under a plan: losses, metrics, weights and checkpoints are its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import graphaccel
from graphaccel.errors import GraphMisuse
from graphaccel.integrations.lightning import PlannedStrategy
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore")]

WIDTH, CLASSES, CLOSE = 8, 4, 1e-9
PLANS = plans_of_two("data", "zero3", "tensor", "pipeline")


class Classifier(lightning.LightningModule):
    """Two layers. within: whether the forward computes the loss."""

    def __init__(self, within: bool, optimizers: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.within, self.count = within, optimizers

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        scores = self.second(torch.tanh(self.first(x)))
        return scores if y is None else F.cross_entropy(scores, y)

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        loss = self(x, y) if self.within else F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(-1) == y).double().mean())

    def configure_optimizers(self) -> Any:
        made = [torch.optim.AdamW(self.parameters(), lr=0.05) for _ in range(self.count)]
        if self.count > 1:
            return made
        return {"optimizer": made[0], "lr_scheduler": torch.optim.lr_scheduler.StepLR(made[0], 1)}


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def fit(
    folder: str, strategy: Any, within: bool, resume: str | None = None
) -> tuple[list[float], float, dict[str, Tensor]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    module = Classifier(within).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, WIDTH, generator=generator).double()
    y = torch.randint(0, CLASSES, (40,), generator=generator)
    losses = Losses()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        callbacks=[losses, ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)],
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(x, y)
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows, 8), ckpt_path=resume)
    planned = hasattr(module, "graphaccel")
    state = graphaccel.full_state_dict(module) if planned else module.state_dict()
    return losses.seen, float(trainer.callback_metrics["accuracy"]), dict(state)


def _planned(plan: dict[str, Any], resumed: dict[str, Any], within: bool, root: str) -> list[Any]:
    whole = fit(f"{root}/planned", PlannedStrategy(devices=2, **plan), within)
    file = f"{root}/planned/step=5.ckpt"
    again = fit(f"{root}/again", PlannedStrategy(devices=2, **resumed), within, file)
    return [whole, again]


@pytest.mark.parametrize("name", PLANS)
def test_equal_to_plain_lightning(pool: Pool, name: str, tmp_path: Path) -> None:
    """Accumulation, clipping, a scheduler, a metric, resuming under another plan."""
    within = name != "data"  # with a loss outside of the module only the batch is split
    losses, accuracy, weights = fit(str(tmp_path / "plain"), "auto", within)
    assert max(losses) - min(losses) > 0.1
    other = PLANS[{"zero3": "tensor", "tensor": "pipeline", "pipeline": "zero3"}.get(name, name)]
    for whole, again in pool.run(2, _planned, PLANS[name], other, within, str(tmp_path)):
        assert whole[0] == pytest.approx(losses, abs=CLOSE)
        assert again[0] == pytest.approx(losses[10:], abs=CLOSE)
        for found in (whole, again):
            assert found[1] == accuracy
            torch.testing.assert_close(found[2], weights, rtol=1e-9, atol=CLOSE)


class Gradual(BaseFinetuning):
    """Trains the second layer, and both from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.first)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.first)
            group = {"params": list(pl_module.first.parameters()), "lr": 0.01}
            optimizer.add_param_group(group)


class OwnGroups(Classifier):
    """Its optimizer gets what is trained at first."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def _finetuned(strategy: Any) -> list[float]:
    torch.manual_seed(0)
    losses, module = Losses(), OwnGroups(within=True).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, WIDTH, generator=generator).double()
    y = torch.randint(0, CLASSES, (16,), generator=generator)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        callbacks=[losses, Gradual()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), 8))
    return losses.seen


def _finetuned_under(plan: dict[str, Any]) -> list[float]:
    return _finetuned(PlannedStrategy(devices=2, **plan))


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_finetuning_in_phases(pool: Pool, name: str) -> None:
    plain = _finetuned("auto")
    for losses in pool.run(2, _finetuned_under, PLANS[name]):
        assert losses == pytest.approx(plain, abs=1e-12)


def _decided() -> list[bool]:
    strategy = PlannedStrategy(devices=2)
    return [
        strategy.reduce_boolean_decision(strategy.is_global_zero, all=every)
        for every in (True, False)
    ]


def test_what_the_first_rank_alone_is_asked_is_known_to_all(pool: Pool) -> None:
    """Whether a file is there, for its name: ranks that differ would save two checkpoints."""
    assert pool.run(2, _decided) == [[False, True]] * 2


def test_its_file_is_a_plain_checkpoint(tmp_path: Path) -> None:
    fit(str(tmp_path), PlannedStrategy(devices=1), within=False)
    plain = Classifier(within=False).double()
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=False)["state_dict"]
    plain.load_state_dict(saved)


@pytest.mark.parametrize(
    ("plugin", "settings", "text"),
    [
        (HalfPrecision("bf16-true"), {}, "asks for what the plan decides"),
        (MixedPrecision("bf16-mixed", "cpu"), {"precision": "fp16"}, "leave one out"),
    ],
)
def test_a_precision_that_contradicts_the_plan_is_refused(
    plugin: Any, settings: dict[str, Any], text: str
) -> None:
    strategy = PlannedStrategy(devices=1, **settings)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, plugins=[plugin], logger=False
    )
    with pytest.raises(GraphMisuse, match=text):
        trainer.fit(Classifier(within=False), DataLoader(TensorDataset(torch.zeros(4, WIDTH))))


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    module = Classifier(within=False, optimizers=2)
    module.automatic_optimization = False
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=PlannedStrategy(devices=1), logger=False
    )
    with pytest.raises(GraphMisuse, match="2 optimizers"):
        trainer.fit(module, DataLoader(TensorDataset(torch.zeros(4, WIDTH))))


class Around(Classifier):
    """Calls its layers, not itself."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self.second(self.first(batch[0])), batch[1])


def test_a_training_step_around_the_forward_is_refused() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=PlannedStrategy(devices=1), logger=False
    )
    rows = TensorDataset(torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.long))
    with pytest.raises(GraphMisuse, match="no call of the optimized model computed"):
        trainer.fit(Around(within=False), DataLoader(rows))


def test_it_is_registered_by_name() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="graphaccel", logger=False)
    assert type(trainer.strategy) is PlannedStrategy


def test_a_checkpoint_is_removed_with_its_optimizer_state(tmp_path: Path) -> None:
    file, beside = tmp_path / "last.ckpt", tmp_path / "last.ckpt.optimizer"
    file.write_text("")
    (beside / "step-00000001").mkdir(parents=True)
    PlannedStrategy(devices=1).remove_checkpoint(file)
    assert not [*tmp_path.iterdir()]


def _fits(strategies: list[Any]) -> tuple[list[float], list[float]]:
    """Losses of a fit with the first layer frozen, then, after a validation, of one that trains
    both; and what the validation and a further one found."""
    torch.manual_seed(0)
    module, seen, found = OwnGroups(within=True).double(), list[float](), list[float]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, WIDTH, generator=generator).double()
    loader = DataLoader(TensorDataset(x, torch.arange(16) % CLASSES), 4)
    for frozen, strategy in zip((True, False), strategies, strict=True):
        module.first.requires_grad_(not frozen)
        losses = Losses()
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, strategy=strategy, callbacks=[losses],
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, precision="64-true",
        )  # fmt: skip
        trainer.fit(module, loader)
        found += [each["accuracy"] for each in trainer.validate(module, loader, verbose=False)]
        seen += losses.seen
    return seen, found


def _fits_under(plans: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return _fits([PlannedStrategy(devices=2, **plan) for plan in plans])


@pytest.mark.parametrize("names", [("zero3", "pipeline"), ("pipeline", "tensor")], ids="-".join)
def test_a_module_is_fitted_twice(pool: Pool, names: tuple[str, str]) -> None:
    losses, accuracies = _fits(["auto", "auto"])
    assert losses[8] < losses[0]
    for found in pool.run(2, _fits_under, [PLANS[name] for name in names]):
        assert found[0] == pytest.approx(losses, abs=CLOSE)
        assert found[1] == accuracies


def _fits_again(plan: dict[str, Any]) -> list[float]:
    """The same trainer, which goes on for an epoch."""
    torch.manual_seed(0)
    module, losses = OwnGroups(within=True).double(), Losses()
    strategy = PlannedStrategy(devices=2, **plan) if plan else "auto"
    x = torch.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH).double()
    loader = DataLoader(TensorDataset(x, torch.arange(16) % CLASSES), 4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, strategy=strategy, callbacks=[losses],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    return losses.seen


def test_a_trainer_fits_twice(pool: Pool) -> None:
    losses = _fits_again({})
    assert len(losses) == 8
    for found in pool.run(2, _fits_again, PLANS["zero3"]):
        assert found == pytest.approx(losses, abs=CLOSE)
