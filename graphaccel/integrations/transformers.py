"""Hugging Face's `Trainer` and `Seq2SeqTrainer`, whose model trains under a plan.

    from graphaccel.integrations.transformers import Trainer  # not: transformers
    trainer = Trainer(model=model, args=args, ..., optimize={"devices": 2})

`optimize` has the keyword arguments of `graphaccel.optimize`; without it, the launcher says how
many ranks there are. `per_device_train_batch_size` is the batch of one device, as it is without a
launcher: all ranks read the same batches, and the plan splits them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from graphaccel.api import full_state_dict, optimize, start_ranks
from graphaccel.errors import GraphMisuse
from graphaccel.integrations.one_process import as_one_process
from graphaccel.integrations.optimizer_state import load_optimizer, save_optimizer
from graphaccel.integrations.training_arguments import pins_of

_OVERRIDDEN = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_save_rng_state")
_OPTIMIZER = "optimizer"


class PlannedSteps:
    """What `Trainer` and `Seq2SeqTrainer` do otherwise under a plan.

    optimize: keyword arguments of `graphaccel.optimize`: `devices`, `plan`, and pins.

    Raises GraphMisuse (GA407) for TrainingArguments that contradict a plan, and what
    `graphaccel.optimize` raises.
    """

    def __init__(
        self, *args: Any, optimize: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        _check_version()
        self._settings, self._resumes = dict(optimize or {}), False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Start the ranks, and tell Accelerate that each of them is alone."""
        self._settings = pins_of(self.args, self._settings)
        devices, cluster = self._settings.get("devices"), self._settings.get("cluster")
        self._settings["devices"], device = start_ranks(devices, cluster=cluster)
        self.args.distributed_state = as_one_process(device)
        self.args._n_gpu = min(self.args.n_gpu, 1)
        vars(self.args)["_setup_devices"] = device
        super().create_accelerator_and_postprocess()

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """Create the optimizer, and let the model train with it under a plan."""
        planned = hasattr(self.model, "graphaccel")
        if planned and self.optimizer is None:
            raise GraphMisuse(
                what="the model was optimized before Trainer had made its optimizer",
                help_line="give Trainer the plain model:  "
                'Trainer(model=model, ..., optimize={"devices": 2})',
            )
        optimizer = super().create_optimizer(*args)
        if not planned:
            self.model._is_accelerate_prepared = True  # neither wrapped nor cast
            example = self._first_call() if self._resumes else None
            optimize(self.model, optimizer, example_batch=example, **self._settings)
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model from the first rank. Called by every rank."""
        folder = output_dir or self.args.output_dir
        self._save(folder, state_dict=full_state_dict(self.model))
        if self.args.push_to_hub and not _internal_call and self.args.should_save:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`. A run that resumes is planned for its first batch."""
        self._resumes = bool(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _first_call(self) -> dict[str, Any]:
        """The keyword arguments of the first call of the model. Random states stay as they are."""
        with _random_states_kept():
            batches = iter(self.get_train_dataloader())
            (batch, *_), items = self.get_batch_samples(batches, 1, self.args.device)
            call = _Call()
            try:
                self.compute_loss(call, self._prepare_inputs(batch), num_items_in_batch=items)
            except _Called:
                return call.inputs
        raise AssertionError("compute_loss did not call the model")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(self.model, self.optimizer.optimizer, Path(output_dir) / _OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer(self.model, self.optimizer.optimizer, Path(checkpoint) / _OPTIMIZER)
        state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same
            super()._save_rng_state(output_dir)


class Trainer(PlannedSteps, transformers.Trainer):
    """`transformers.Trainer`, whose model trains under a plan."""


class Seq2SeqTrainer(PlannedSteps, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, whose model trains under a plan."""


def _check_version() -> None:
    missing = [name for name in _OVERRIDDEN if not hasattr(transformers.Trainer, name)]
    if missing:
        raise GraphMisuse(
            what=f"transformers {transformers.__version__} has no Trainer.{missing[0]}",
            help_line="pip install 'transformers>=5.0'",
        )


class _Called(Exception):
    """The model was called."""


class _Call(torch.nn.Module):
    """Stands for the model in `compute_loss`, and keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, Any] = {}

    def forward(self, **inputs: Any) -> Any:
        self.inputs = inputs
        raise _Called


@contextmanager
def _random_states_kept() -> Iterator[None]:
    python, own = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(own)
