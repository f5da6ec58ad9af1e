"""Hugging Face's `Trainer` and `Seq2SeqTrainer`, whose model trains under a plan.

    from graphaccel.integrations.transformers import Trainer  # not: transformers
    trainer = Trainer(model=model, args=args, ..., optimize={"devices": 2})

`optimize` has the keyword arguments of `graphaccel.optimize`; without it, the launcher says how
many ranks there are. `per_device_train_batch_size` is the batch of one device, as it is without a
launcher: all ranks read the same batches, and the plan splits them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers.trainer as plain
import transformers.trainer_seq2seq as plain_seq2seq

from graphaccel.api import full_state_dict, optimize
from graphaccel.checkpoint.load import load
from graphaccel.checkpoint.save import save
from graphaccel.errors import GraphMisuse
from graphaccel.integrations.last_batch import check_last_batch
from graphaccel.integrations.one_process import MARK, counted, read_everywhere, start
from graphaccel.integrations.settings import norm_everywhere, wait_for_all
from graphaccel.integrations.training_arguments import pins_of
from graphaccel.integrations.written import TRAINER, as_written
from graphaccel.runtime.environment import check_launcher
from graphaccel.runtime.parameters.released import release

_OVERRIDDEN = ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_save_rng_state")
_OPTIMIZER = "optimizer"
# For type checkers: `PlannedSteps` is mixed into two classes, whose attributes it reads.
_Trainer: Any = object

# TrainingArguments, which a script makes before a Trainer, join a process group by themselves.
if not torch.distributed.is_initialized():
    check_launcher()


class PlannedSteps(_Trainer):
    """What `Trainer` and `Seq2SeqTrainer` do otherwise under a plan.

    optimize: keyword arguments of `graphaccel.optimize`: `devices`, `plan`, and pins.

    Raises GraphMisuse (GA407) for TrainingArguments that contradict a plan, and what
    `graphaccel.optimize` raises.
    """

    def __init__(
        self, *args: Any, optimize: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        _check_version()
        self._settings = dict(optimize or {})
        self._begun = self._planned = False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Start the ranks, and tell Accelerate that each of them is alone."""
        self._settings, state = start(pins_of(self.args, self._settings))
        self.args.distributed_state = state
        vars(self.args)["_setup_devices"] = state.device  # else it warns of the group that exists
        self.args._n_gpu = int(str(state.device).startswith("cuda"))
        super().create_accelerator_and_postprocess()
        read_everywhere(self.accelerator)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; each rank reads."""
        return counted(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; each rank reads."""
        return counted(super().get_test_dataloader(*args, **kwargs))

    def create_optimizer(self, *args: Any) -> torch.optim.Optimizer:
        """Create the optimizer, and let the model train with it under a plan."""
        planned = hasattr(self.model, "graphaccel")
        if planned and not self._planned and MARK in vars(self.model):
            release(self.model)  # of an earlier Trainer, which had another optimizer
            planned = False
        if planned and self.optimizer is None:
            raise GraphMisuse(
                what="the model was optimized before Trainer had made its optimizer",
                help_line="give Trainer the plain model:  "
                'Trainer(model=model, ..., optimize={"devices": 2})',
            )
        optimizer = super().create_optimizer(*args)
        if not planned:
            vars(self.model)[MARK] = True
            optimize(self.model, optimizer, **self._settings)
            self._planned = True
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Errors name `Trainer(optimize=...)`.

        Raises GraphMisuse (GA407) for a data set without rows.
        """
        if isinstance(self.train_dataset, Sized) and len(self.train_dataset) == 0:
            raise GraphMisuse(
                what="train_dataset has no rows",
                help_line="see what is read, and what a filter leaves:  print(train_dataset)",
            )
        with as_written(TRAINER):
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Errors name `Trainer(optimize=...)`."""
        with as_written(TRAINER):
            return super().evaluation_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Trainer's. A last batch of an epoch that the plan refuses is named after the first."""
        loss = super().training_step(*args, **kwargs)
        if not self._begun:
            self._begun = True
            if self._sees_last_batch():
                loader = self.callback_handler.train_dataloader
                line = "TrainingArguments(dataloader_drop_last=True)"
                check_last_batch(self.model, loader, line)
        return loss

    def _sees_last_batch(self) -> bool:
        """Whether an epoch ends before the run does."""
        loader, state = self.callback_handler.train_dataloader, self.state
        try:
            updates = -(-len(loader) // self.args.gradient_accumulation_steps)
        except TypeError:  # a data set without a length
            return False
        return state.max_steps // updates > state.global_step // updates

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return norm_everywhere(super()._get_grad_norm(model, grad_norm), self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model from the first rank. Called by every rank; it is there when they
        go on."""
        folder = output_dir or self.args.output_dir
        self._save(folder, state_dict=full_state_dict(self.model))
        wait_for_all()
        if self.args.push_to_hub and not _internal_call and self.args.should_save:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder, step = Path(output_dir) / _OPTIMIZER, self.state.global_step
        save(folder, self.model, self.optimizer.optimizer, step=step, weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZER).is_dir():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(Path(checkpoint) / _OPTIMIZER, self.model, self.optimizer.optimizer, weights=False)
        state = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same
            super()._save_rng_state(output_dir)


class Trainer(PlannedSteps, plain.Trainer):
    """`transformers.Trainer`, whose model trains under a plan."""


class Seq2SeqTrainer(PlannedSteps, plain_seq2seq.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, whose model trains under a plan."""


def _check_version() -> None:
    missing = [name for name in _OVERRIDDEN if not hasattr(plain.Trainer, name)]
    if missing:
        raise GraphMisuse(
            what=f"transformers {version('transformers')} has no Trainer.{missing[0]}",
            help_line="pip install 'transformers>=5.0'",
        )
