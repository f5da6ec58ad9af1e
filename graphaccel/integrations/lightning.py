"""A strategy of Lightning whose module trains under a plan.

    from graphaccel.integrations.lightning import PlannedStrategy
    trainer = Trainer(strategy=PlannedStrategy(devices=2), devices=1)  # or strategy="graphaccel"

Its arguments are those of `graphaccel.optimize`; without them, the launcher says how many ranks
there are. All ranks read the same batches, and the plan splits them: to Lightning, each rank is the
only process. `training_step` calls the module (`self(batch)`), whose forward is what is planned.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from graphaccel.api import full_state_dict, optimize
from graphaccel.checkpoint.load import load
from graphaccel.checkpoint.save import save
from graphaccel.errors import GraphMisuse
from graphaccel.integrations.last_batch import check_last_batch
from graphaccel.integrations.settings import started, with_precision
from graphaccel.integrations.written import LIGHTNING, write_for
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.parameters.released import release

_MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_SUFFIX = ".optimizer"


class PlannedStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one device, with the module under a plan on all ranks.

    settings: keyword arguments of `graphaccel.optimize`: `devices`, `plan`, and pins.
      `Trainer(precision="bf16-mixed")` is the pin `precision`.

    Raises GraphMisuse (GA407) for what contradicts a plan, and what `graphaccel.optimize` raises.
    """

    strategy_name = "graphaccel"

    def __init__(self, **settings: Any) -> None:
        write_for(self, LIGHTNING)
        self._settings, device = started(settings)
        super().__init__(device=device)
        self._restored: Path | None = None
        self._begun = False
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank = dist.get_rank() if dist.is_initialized() else 0
        rank_zero_only.rank = self.global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes and prints."""
        return self.global_rank == 0

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            with answered("all ranks"):
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`, such as the folder of a checkpoint, on all ranks."""
        if not dist.is_initialized():
            return obj
        sent = [obj]
        with answered(f"what rank {src} sends"):
            dist.broadcast_object_list(sent, src=src)
        return sent[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One answer for all ranks: whether all of them say yes, or any. Lightning asks some
        questions (is this file there?) of the first rank alone."""
        if not dist.is_initialized():
            return decision
        said = torch.tensor(int(decision), device=self.root_device)
        with answered("what all ranks say"):
            dist.all_reduce(said, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(said)

    def setup(self, trainer: Any) -> None:
        """Let the module train under a plan, with the optimizer that it configures."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and hasattr(self._module, "graphaccel"):
            release(self._module)  # of an earlier fit, which had another optimizer
            self._begun = False
        self._settings = _precision_of(self._settings, self.precision_plugin)
        if "precision" in self._settings:
            self.precision_plugin = Precision()
        super().setup(trainer)
        if fits:
            optimize(self._module, self._optimizer, **self._settings)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As for one device. A last batch of an epoch that the plan refuses is named after the
        first."""
        output = super().training_step(*args, **kwargs)
        if not self._begun:
            self._begun = True
            assert self.lightning_module is not None
            trainer = self.lightning_module.trainer
            loader = trainer.train_dataloader
            if _ends_an_epoch(trainer, loader):
                line = "DataLoader(dataset, batch_size=..., drop_last=True)"
                check_last_batch(self._module, loader, line)
        return output

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        if len(self.optimizers) != 1:
            raise GraphMisuse(
                what=f"configure_optimizers() returns {len(self.optimizers)} optimizers; "
                "a plan needs one",
                help_line="return torch.optim.AdamW(self.parameters())",
            )
        return self.optimizers[0]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are read into the module that has its optimizer."""
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read what Lightning wrote; the optimizer state is in a folder beside it."""
        self._restored = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state that the ranks wrote under any plan, or that of a plain Lightning run."""
        folder = None if self._restored is None else _beside(self._restored)
        if folder is not None and folder.is_dir():
            load(folder, self._module, self._optimizer, weights=False)
        else:
            super().load_optimizer_state_dict(checkpoint)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All weights, on the CPU. Called by every rank."""
        if not hasattr(self._module, "graphaccel"):
            return super().lightning_module_state_dict()
        return dict(full_state_dict(self._module))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: each rank writes its part in `save_checkpoint`."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write the file from the first rank, and the optimizer state from all of them."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if checkpoint.get("optimizer_states"):
            folder = _beside(Path(filepath))
            step = int(checkpoint["global_step"])
            save(folder, self._module, self._optimizer, step=step, weights=False)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the file, and the optimizer state beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(Path(filepath)), ignore_errors=True)


StrategyRegistry.register(
    PlannedStrategy.strategy_name,
    PlannedStrategy,
    "Trains under a plan of graphaccel",
    override=True,
)


def _ends_an_epoch(trainer: Any, loader: Any) -> bool:
    """Whether the run comes to the last batch of a loader; False where that is not known."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = trainer.num_training_batches
    if trainer.max_steps != -1:
        batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
        batches *= trainer.global_step == 0  # of a run that resumes
    return batches >= len(loader)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def _precision_of(settings: Mapping[str, Any], plugin: Precision) -> dict[str, Any]:
    """The arguments of `optimize` with the precision that the Trainer's plugin asks for."""
    if type(plugin) in (Precision, DoublePrecision):
        return dict(settings)
    asked = _MIXED.get(str(plugin.precision)) if type(plugin) is MixedPrecision else None
    if asked is None:
        raise GraphMisuse(
            what=f"Trainer(precision={plugin.precision!r}) asks for what the plan decides",
            help_line="Trainer(strategy=PlannedStrategy(precision='bf16'))",
        )
    argument = f"Trainer(precision={plugin.precision!r})"
    return with_precision(settings, asked, argument, "PlannedStrategy(precision={!r})")
