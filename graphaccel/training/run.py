"""Trains a model as the settings of `graphaccel train` say, with Trainer under a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from graphaccel.errors import BadData, BadTraining
from graphaccel.integrations.transformers import Trainer
from graphaccel.training.metrics import MetricsFile
from graphaccel.training.models import make_model, read_config
from graphaccel.training.rows import Rows, first_rows, make_rows
from graphaccel.training.settings import Settings

_CLASSES = ("sequence-classification", "image-classification")
_OTHER_AXES = ("tensor", "pipeline", "context", "expert")


def train(settings: Settings, pins: Mapping[str, Any], devices: int | None) -> dict[str, float]:
    """Train, evaluate, and write the model and tokenizer to the folder `model` of the output.

    pins: decisions of the plan. devices: ranks; None as the launcher says. Called by every rank.
    Returns the last evaluation's metrics.

    Raises BadTraining (GA418), BadData (GA417), and what `graphaccel.optimize` raises.
    """
    transformers.set_seed(settings.seed)
    config = read_config(settings.model, settings.model_settings)
    rows = make_rows(settings, config)
    model = make_model(settings.task, settings.model, config)
    batch = settings.global_batch // settings.gradient_accumulation
    planned = {**pins, **_microbatches(settings, pins, devices, batch)}
    if devices is not None:
        planned["devices"] = devices
    validation = first_rows(
        rows.validation, settings.eval_batches and settings.eval_batches * batch
    )
    trainer = Trainer(
        model=model,
        args=_arguments(settings, rows, evaluated=len(validation) > 0),
        train_dataset=rows.train,
        eval_dataset=validation if len(validation) else None,
        compute_metrics=_accuracy if settings.task in _CLASSES else None,
        callbacks=_callbacks(settings),
        optimize=planned,
    )
    trainer.train(resume_from_checkpoint=_checkpoint(settings))
    metrics = trainer.evaluate() if len(validation) else {}
    if settings.task not in _CLASSES and "eval_loss" in metrics:
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    folder = settings.output / "model"
    trainer.save_model(str(folder))
    if rows.tokenizer is not None and trainer.args.should_save:
        rows.tokenizer.save_pretrained(folder)
    return metrics


def _microbatches(
    settings: Settings, pins: Mapping[str, Any], devices: int | None, batch: int
) -> dict[str, int]:
    """The pin that `micro_batch` stands for: batch = micro x data ranks x microbatches.

    Raises BadTraining (GA418) where this has no whole number, or the data ranks are not known.
    """
    if settings.micro_batch is None:
        return {}
    if "microbatches" in pins:
        raise BadTraining(
            what="`micro_batch` and the pin `microbatches` are both given",
            help_line=f"--microbatches {pins['microbatches']}",
        )
    ranks = pins.get("data")
    if ranks is None:
        if devices is None:
            raise BadTraining(
                what="`micro_batch` needs to know the data ranks", help_line="--data-parallel 2"
            )
        others = math.prod(pins.get(axis, 1) for axis in _OTHER_AXES)
        ranks = max(1, devices // others)
    count, rest = divmod(batch, settings.micro_batch * ranks)
    if rest or not count:
        smallest = settings.micro_batch * ranks * settings.gradient_accumulation
        fitting = max(smallest, settings.global_batch // smallest * smallest)
        raise BadTraining(
            what=f"a step of {batch} rows is no multiple of micro batch {settings.micro_batch} x "
            f"{ranks} data ranks",
            help_line=f"--global-batch {fitting}",
        )
    return {"data": ranks, "microbatches": count}


def _arguments(settings: Settings, rows: Rows, *, evaluated: bool) -> TrainingArguments:
    batch = settings.global_batch // settings.gradient_accumulation
    steps = _updates(settings, len(rows.train))  # pyright: ignore[reportArgumentType]
    warmup = settings.warmup_steps
    lowest = settings.min_learning_rate
    schedule = "cosine_with_min_lr" if lowest else settings.decay
    interval = settings.eval_interval or steps
    return TrainingArguments(
        output_dir=str(settings.output),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=settings.gradient_accumulation,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"min_lr": lowest} if lowest else {},
        warmup_steps=round(settings.warmup_fraction * steps) if warmup is None else warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        seed=settings.seed,
        logging_steps=settings.log_interval,
        eval_strategy="steps" if evaluated and interval < steps else "no",
        eval_steps=interval,
        save_steps=settings.save_interval or steps,
        save_total_limit=settings.keep,
        prediction_loss_only=settings.task not in _CLASSES,
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )


def _updates(settings: Settings, rows: int) -> int:
    """How many updates the run has."""
    if rows < settings.global_batch:
        raise BadData(
            place=", ".join(settings.data),
            reason=f"it has {rows} rows to train on, fewer than a global batch of "
            f"{settings.global_batch}",
            help_line=f"--global-batch {rows}" if rows else "",
        )
    if settings.steps is not None:
        return settings.steps
    epochs = 1.0 if settings.epochs is None else settings.epochs
    return max(1, round(epochs * (rows // settings.global_batch)))


def _callbacks(settings: Settings) -> list[Any]:
    if settings.metrics is None:
        return []
    tokens = None if settings.task == "image-classification" else settings.length
    return [MetricsFile(settings.metrics, settings.global_batch, tokens, resumes=settings.resume)]


def _checkpoint(settings: Settings) -> str | None:
    """The newest checkpoint of the output folder, where the run is to resume.

    Raises BadTraining (GA418) where there is none.
    """
    if not settings.resume:
        return None
    folder = Path(settings.output)
    newest = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if newest is None:
        raise BadTraining(what=f"`{folder}` has no checkpoint", help_line="leave --resume out")
    return newest


def _accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}
