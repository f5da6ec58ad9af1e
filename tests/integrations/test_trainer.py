"""Hugging Face's Trainer under a plan: losses, metrics, weights and checkpoints are its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from graphaccel.integrations.transformers import Trainer
from graphaccel.planner.plan.plan_name import plan_name
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.scripts import plans_of_two

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore"),  # of the libraries: what they deprecate is not ours
]

PLANS = plans_of_two("data", "zero3", "tensor", "pipeline")
ROWS, LENGTH, WORDS = 40, 8, 32
GPT2 = "GPT-2 under training loops"
"""What tests of training loops share captures of."""
CLOSE = 1e-7  # the model is in float64, the loss of transformers in float32


class Lines(torch.utils.data.Dataset):
    """`count` lines of random tokens."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, WORDS, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def last_layer() -> GPT2LMHeadModel:
    """Trains its last norm alone, in the last stage of a pipeline."""
    model = gpt2()
    model.transformer.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    return model


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, n_positions=LENGTH, vocab_size=WORDS, **drops
    )
    return GPT2LMHeadModel(config).double()


def arguments(folder: str, **changed: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        "load_best_model_at_end": True,
    }
    return TrainingArguments(**{**given, **changed})


def accuracy(prediction: Any) -> dict[str, float]:
    """Of all lines: 21 are no whole number of batches."""
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "lines": len(prediction.label_ids)}


def run(
    kind: type, folder: str, dropout: float = 0.0, resume: str | None = None, **more: Any
) -> tuple[list[dict[str, Any]], Any]:
    changed = more.pop("changed", {})
    transformers.utils.logging.disable_progress_bar()
    trainer = kind(
        model=more.pop("model", None) or gpt2(dropout),
        args=arguments(folder, **changed),
        train_dataset=Lines(ROWS, seed=1),
        eval_dataset=Lines(21, seed=2),
        compute_metrics=accuracy,
        **more,
    )
    trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_lines")
    history = [{k: row[k] for k in kept if k in row} for row in trainer.state.log_history]
    return [row for row in history if row], trainer


def apart(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    assert [[*row] for row in first] == [[*row] for row in second]
    return max(abs(a[k] - b[k]) for a, b in zip(first, second, strict=True) for k in a)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=Lines(4, seed=3).ids).logits


def loaded(folder: str) -> torch.Tensor:
    return logits(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64))


@captures_of(GPT2)
def _trained(plan: dict[str, Any], resumed: dict[str, Any], root: str) -> list[Any]:
    """What a rank sees of a run under `plan`, and of one that resumes in mid-run."""
    folder = f"{root}/planned"
    history, trainer = run(Trainer, folder, optimize=plan)
    again, _ = run(Trainer, f"{root}/again", resume=f"{folder}/checkpoint-2", optimize=resumed)
    name = plan_name(trainer.model.graphaccel.plan)
    best = trainer.state.best_model_checkpoint
    return [name, history, again, logits(trainer.model), Path(best).name]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Any, str]:
    """transformers' own Trainer on one process: its history, what it ends with, its folder."""
    folder = str(tmp_path_factory.mktemp("plain"))
    history, trainer = run(transformers.Trainer, folder)
    return history, trainer, folder


@pytest.mark.parametrize("name", PLANS)
def test_equal_to_the_plain_trainer(
    pool: Pool, plain: tuple[list[dict[str, Any]], Any, str], name: str, tmp_path: Path
) -> None:
    """Accumulation, clipping, warm-up, metrics, the best model at the end, resuming."""
    order = [*PLANS]
    other = PLANS[order[order.index(name) - 1]]  # a checkpoint is resumed under another plan
    history, reference, folder = plain
    expected = logits(reference.model), Path(reference.state.best_model_checkpoint).name
    assert apart(history[:1], history[1:2]) > 1e-3
    for found in pool.run(2, _trained, PLANS[name], other, str(tmp_path), timeout_s=300):
        plan, planned, again, final, best = found
        assert plan != "one device"
        assert apart(history, planned) < 1e-6  # Trainer adds losses in float32
        assert apart(history[-len(again) :], again) < 1e-6
        assert best == expected[1]
        assert (final - expected[0]).abs().max() < CLOSE
    last = f"{tmp_path}/planned/checkpoint-4"
    assert (loaded(last) - loaded(f"{folder}/checkpoint-4")).abs().max() < CLOSE
    assert sorted(os.listdir(last)) == [
        "config.json", "generation_config.json", "model.safetensors", "optimizer",
        "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
    ]  # fmt: skip


@captures_of(GPT2)
def _last_layer(folder: str) -> list[dict[str, Any]]:
    return run(Trainer, folder, optimize=PLANS["pipeline"], model=last_layer())[0]


def test_a_stage_that_trains_nothing(pool: Pool, tmp_path: Path) -> None:
    """Its rank logs the norm of gradients that it has none of."""
    history, _ = run(transformers.Trainer, f"{tmp_path}/plain", model=last_layer())
    for found in pool.run(2, _last_layer, f"{tmp_path}/planned"):
        assert apart(history, found) < 1e-6


def _in_phases(kind: type, folder: str, **more: Any) -> list[dict[str, Any]]:
    """The last norm alone, then all layers, each with a Trainer of its own."""
    model, history = last_layer(), list[dict[str, Any]]()
    for phase in range(2):
        history += run(kind, f"{folder}/{phase}", model=model, **more)[0]
        model.requires_grad_(True)
    return history


@captures_of(GPT2)
def _in_phases_under(plan: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    return _in_phases(Trainer, folder, optimize=plan)


@pytest.mark.parametrize("name", ["zero3", "pipeline"])
def test_a_model_has_a_trainer_for_each_phase(pool: Pool, name: str, tmp_path: Path) -> None:
    history = _in_phases(transformers.Trainer, f"{tmp_path}/plain")
    norms = [row["grad_norm"] for row in history if "grad_norm" in row]
    assert norms[4] > 10 * norms[0]
    for found in pool.run(2, _in_phases_under, PLANS[name], f"{tmp_path}/planned", timeout_s=300):
        assert apart(history, found) < 1e-6
