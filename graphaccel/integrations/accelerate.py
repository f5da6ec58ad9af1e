"""Hugging Face's `Accelerator`, which trains the model that it prepares under a plan.

    from graphaccel.integrations.accelerate import Accelerator  # not: accelerate
    accelerator = Accelerator(optimize={"devices": 2})

`optimize` has the keyword arguments of `graphaccel.optimize`; without it, the launcher says how
many ranks there are. All ranks read the same batches, and the plan splits them: to the script, each
rank is the only process.
"""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from torch import nn

from graphaccel.api import full_state_dict, optimize
from graphaccel.checkpoint.load import load
from graphaccel.checkpoint.save import save
from graphaccel.errors import GraphMisuse
from graphaccel.integrations.one_process import MARK, counted, read_everywhere, start
from graphaccel.integrations.settings import any_rank, wait_for_all, with_precision
from graphaccel.integrations.written import ACCELERATOR, as_written, write_for
from graphaccel.runtime.parameters.released import release

_REPLACED = {  # argument of Accelerator → what to write instead
    "deepspeed_plugin": 'optimize={"zero": 3}',
    "deepspeed_plugins": 'optimize={"zero": 3}',
    "fsdp_plugin": 'optimize={"zero": 3}',
    "megatron_lm_plugin": 'optimize={"tensor": 2}',
    "torch_tp_plugin": 'optimize={"tensor": 2}',
    "parallelism_config": 'optimize={"tensor": 2}',
    "dynamo_backend": 'optimize={"compile": "inductor"}',
    "dynamo_plugin": 'optimize={"compile": "inductor"}',
}
_SIGNATURE = inspect.signature(accelerate.Accelerator)
_PRECISION = {"no": None, "fp16": "fp16", "bf16": "bf16"}


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` of a job with one process, whose models train under a plan.

    optimize: keyword arguments of `graphaccel.optimize`. `mixed_precision` is the pin `precision`.

    Raises GraphMisuse (GA407) for an argument that contradicts a plan, or for a model without its
    optimizer, and what `graphaccel.optimize` raises.
    """

    def __init__(
        self, *args: Any, optimize: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        write_for(self, ACCELERATOR)
        given = _SIGNATURE.bind_partial(*args, **kwargs).arguments
        self._settings, state = start(_pins_of(given, optimize or {}))
        assert state.device is not None
        super().__init__(**{**given, "mixed_precision": "no", "cpu": state.device.type == "cpu"})
        read_everywhere(self)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        wait_for_all()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first rank enters the block alone, and the others when it has left."""
        with _first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The same for the first rank of each machine."""
        with _first(self.is_local_main_process):
            yield

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.prepare`. A model is optimized with its optimizer."""
        models = [x for x in objects if isinstance(x, nn.Module) and _is_trained(x)]
        optimizers = [x for x in objects if isinstance(x, torch.optim.Optimizer)]
        for model in models:
            own = [x for x in optimizers if _trains(x, model)]
            new = own and not isinstance(own[0], AcceleratedOptimizer)
            if new and hasattr(model, "graphaccel") and MARK in vars(model):
                release(model)  # prepared before, with another optimizer
            if len(own) != 1 or hasattr(model, "graphaccel"):
                raise _unpaired(model, "prepare()", len(own))
            vars(model)[MARK] = True
            optimize(model, own[0], **self._settings)
        return super().prepare(*objects, **kwargs)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.backward`, which runs in threads of its own on a GPU."""
        with as_written(ACCELERATOR):
            super().backward(loss, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As `accelerate.Accelerator.prepare_model`. A model that trains has its optimizer in
        `prepare`."""
        if not evaluation_mode and _is_trained(model) and not hasattr(model, "graphaccel"):
            raise _unpaired(model, "prepare_model()", 0)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def check_trigger(self) -> bool:
        """As `accelerate.Accelerator.check_trigger`: whether any rank has set the trigger."""
        raised = any_rank(super().check_trigger(), self.device)
        if raised:
            self.flag_tensor = None
        return raised

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """As `accelerate.Accelerator.prepare_data_loader`; each rank reads."""
        return counted(super().prepare_data_loader(*args, **kwargs))

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.init_trackers`; the first rank alone has trackers."""
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which the first rank alone runs."""
        return function if self.is_main_process else _nothing

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which the first rank of each machine alone runs."""
        return function if self.is_local_main_process else _nothing

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All weights of the model, on the CPU; tied weights share memory. Called by every rank."""
        full = OrderedDict(full_state_dict(model))
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            full[name] = full[first.setdefault(id(parameter), name)]
        return full

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.save_model`; the files are there when the ranks go on."""
        super().save_model(*args, **kwargs)
        wait_for_all()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Path:
        """As `accelerate.Accelerator.save_state`; each rank writes its part of optimizer state."""
        with self._without_optimizers():
            folder = super().save_state(output_dir, *args, **kwargs)
        for number, (model, optimizer) in enumerate(self._pairs()):
            own = _folder(Path(folder), number)
            save(own, model, optimizer, step=self.step, weights=False)
        wait_for_all()
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As `accelerate.Accelerator.load_state`, under any plan."""
        folder = Path(input_dir) if input_dir else self._newest()
        state = PartialState()
        rank, state.process_index = state.process_index, 0  # random states are those of all ranks
        hook = self.register_load_state_pre_hook(self._with_whole_weights)
        try:
            with self._without_optimizers():
                super().load_state(str(folder), *args, **kwargs)
        finally:
            hook.remove()
            state.process_index = rank
        for number, (model, optimizer) in enumerate(self._pairs()):
            load(_folder(folder, number), model, optimizer, weights=False)

    def _with_whole_weights(self, models: list[Any], folder: str) -> None:
        for place, model in enumerate(models):
            if hasattr(model, "graphaccel"):
                models[place] = _Whole(model, self.get_state_dict(model))

    def _newest(self) -> Path:
        """The newest checkpoint where Accelerate names them itself."""
        built = Path(self.project_dir or ".", "checkpoints").glob("checkpoint_*")
        return max(built, key=lambda folder: int(folder.name.rpartition("_")[2]))

    def _pairs(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        optimizers = [x.optimizer for x in self._optimizers]
        for model in {id(model): model for model in self._models}.values():
            if hasattr(model, "graphaccel"):  # prepared with the last of its optimizers
                yield model, next(x for x in reversed(optimizers) if _trains(x, model))

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        kept, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = kept


@dataclass(frozen=True)
class _Whole:
    """A model and its whole `state`, for `safetensors.torch.load_model`: it finds tied weights by
    their memory, of which a rank has a part."""

    model: nn.Module
    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _first(is_first: bool) -> Iterator[None]:
    if not is_first:
        wait_for_all()
    try:
        yield
    finally:
        if is_first:
            wait_for_all()


def _pins_of(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    for name, instead in _REPLACED.items():
        if arguments.get(name) is not None:
            raise GraphMisuse(
                what=f"Accelerator({name}=...) asks for what the plan decides",
                help_line=f"leave it out; the plan's own is:  {instead}",
            )
    given = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
    asked = _PRECISION.get(str(given or "no"), given)
    return with_precision(settings, asked, f"Accelerator(mixed_precision={asked!r})")


def _is_trained(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(p) for p in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _unpaired(model: nn.Module, call: str, count: int) -> GraphMisuse:
    if hasattr(model, "graphaccel"):
        return GraphMisuse(
            what=f"{call} got a model that runs under a plan already",
            help_line="leave graphaccel.optimize out; its arguments are given by:  "
            'Accelerator(optimize={"devices": 2})',
        )
    return GraphMisuse(
        what=f"{call} got a model with {count} optimizers of its parameters; a plan needs one",
        help_line="model, optimizer = accelerator.prepare(model, optimizer)",
        other_help="or, to evaluate alone:  "
        "model = accelerator.prepare_model(model, evaluation_mode=True)",
    )


def _folder(folder: Path, number: int) -> Path:
    return folder / ("optimizer" if number == 0 else f"optimizer_{number}")
