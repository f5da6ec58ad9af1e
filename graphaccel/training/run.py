"""Trains a model as the settings of `graphaccel train` say, with Trainer under a plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import set_seed
from transformers.training_args import TrainingArguments

from graphaccel.errors import BadData, BadTraining
from graphaccel.integrations.transformers import Trainer
from graphaccel.training.batch import batch_pins
from graphaccel.training.metrics import Metrics, MetricsBoard, MetricsFile
from graphaccel.training.models import check_positions, forward_of, make_model, read_config
from graphaccel.training.resume import Record, checkpoint_of
from graphaccel.training.rows import Rows, make_rows
from graphaccel.training.settings import Settings, check_warmup, model_task
from graphaccel.training.table import FirstRows

_CLASSES = ("sequence-classification", "image-classification")


def prepare(settings: Settings) -> None:
    """Read the model's configuration, the data and what a run resumes from once, and write the
    token files, before processes start: each would find the same, and say it.

    Raises BadData (GA417), BadTraining (GA418).
    """
    config, rows = _read(settings)
    checkpoint_of(settings, config, _updates(settings, _whole_batches(settings, rows)))
    _callbacks(settings)


def _read(settings: Settings) -> tuple[PretrainedConfig, Rows]:
    config = read_config(settings.model, settings.model_settings)
    forward_of(model_task(settings), config)  # a missing task is reported before data is read
    return config, make_rows(settings, config)


def train(settings: Settings, pins: Mapping[str, Any], devices: int) -> dict[str, float]:
    """Train, evaluate, and write the model and tokenizer to the folder `model` of the output.

    pins: decisions of the plan. devices: ranks. Called by every rank.
    Returns the last evaluation's metrics.

    Raises BadTraining (GA418), BadData (GA417), and what `graphaccel.optimize` raises.
    """
    set_seed(settings.seed)
    config, rows = _read(settings)
    model = make_model(model_task(settings), settings.model, config)
    check_positions(model, settings.length)
    batch = settings.global_batch // settings.gradient_accumulation
    planned = {**pins, **batch_pins(settings, pins, devices), "devices": devices}
    validation = rows.validation
    if settings.eval_batches is not None:
        validation = FirstRows(validation, settings.eval_batches * batch)
    with _without_advice():
        arguments = _arguments(settings, rows, evaluated=len(validation) > 0)
    newest = checkpoint_of(settings, config, arguments.max_steps)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=FirstRows(rows.train, _whole_batches(settings, rows)),
        eval_dataset=validation if len(validation) else None,
        compute_metrics=_accuracy if settings.task in _CLASSES else None,
        callbacks=[Record(settings, config), *_callbacks(settings)],
        optimize=planned,
    )
    trainer.train(resume_from_checkpoint=newest)
    metrics = trainer.evaluate() if len(validation) else {}
    if settings.task not in _CLASSES and "eval_loss" in metrics:
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700.0))
    folder = settings.output / "model"
    trainer.save_model(str(folder))
    if rows.tokenizer is not None and trainer.args.should_save:
        rows.tokenizer.save_pretrained(folder)
    return metrics


@contextmanager
def _without_advice() -> Iterator[None]:
    """Meanwhile TrainingArguments gives no advice about torch's DDP, whose place a plan takes."""
    logger = logging.getLogger("transformers.training_args")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _arguments(settings: Settings, rows: Rows, *, evaluated: bool) -> TrainingArguments:
    batch = settings.global_batch // settings.gradient_accumulation
    steps = _updates(settings, _whole_batches(settings, rows))
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
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )


def _whole_batches(settings: Settings, rows: Rows) -> int:
    """Training rows in whole global batches. Raises BadData (GA417) where there is none."""
    count = len(rows.train)
    if count < settings.global_batch:
        raise BadData(
            place=", ".join(settings.data),
            reason=f"it has {count} rows to train on, fewer than a global batch of "
            f"{settings.global_batch}",
            help_line=f"--global-batch {count}" if count else "--split 95,5, or more data",
        )
    return count // settings.global_batch * settings.global_batch


def _updates(settings: Settings, rows: int) -> int:
    """How many updates the run has. Raises BadTraining (GA418) for a longer warm-up."""
    if settings.steps is not None:
        return settings.steps
    epochs = 1.0 if settings.epochs is None else settings.epochs
    updates = max(1, round(epochs * (rows // settings.global_batch)))
    check_warmup(settings, updates)
    return updates


def _callbacks(settings: Settings) -> list[Any]:
    """Raises BadTraining (GA418) where TensorBoard is asked for and not installed."""
    writers: list[MetricsFile | MetricsBoard] = []
    if settings.metrics is not None:
        writers.append(MetricsFile(settings.metrics, resumes=settings.resume))
    if settings.tensorboard:
        if not is_tensorboard_available():
            what = "TensorBoard is not installed"
            raise BadTraining(what=what, help_line="pip install tensorboard")
        writers.append(MetricsBoard(settings.output / "runs"))
    tokens = None if settings.task == "image-classification" else settings.length
    return [Metrics(writers, settings.global_batch, tokens)] if writers else []


def _accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}
