"""Tells Accelerate that this rank is the only process of its job, so that it splits nothing.

Every rank of a planned step takes the same global batch, and the step splits it. Accelerate, and
the loops built on it, would give each rank other rows, average over ranks and wrap the model. They
do none of it in a job of one process. The rank itself stays known, so that the first rank alone
writes and prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset

from graphaccel.errors import GraphMisuse
from graphaccel.integrations.settings import started

_LAUNCHED = {  # what `accelerate launch` sets → its option, and what to write instead
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", 'optimize={"zero": 3}'),
    "ACCELERATE_USE_FSDP": ("--use_fsdp", 'optimize={"zero": 3}'),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", 'optimize={"tensor": 2}'),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", 'optimize={"tensor": 2}'),
    "ACCELERATE_DYNAMO_BACKEND": ("--dynamo_backend", 'optimize={"compile": "inductor"}'),
}
MARK = "_is_accelerate_prepared"
"""An attribute of a model, by which Accelerate neither wraps nor casts it: these loops set it for
one that they let train under a plan."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def start(settings: Mapping[str, Any]) -> tuple[dict[str, Any], PartialState]:
    """Make this process one of the ranks that `settings` ask for, the arguments of `optimize`.

    Returns them with the number of devices, and Accelerate's state of a job with one process.

    Raises GraphMisuse (GA407) for an option of `accelerate launch` that the plan decides.
    """
    for variable, (option, instead) in _LAUNCHED.items():
        value = os.environ.get(variable, "")
        if value.lower() not in ("", "no", "false", "0"):
            raise GraphMisuse(
                what=f"{variable}={value}, as `accelerate launch {option}` sets it, asks for what "
                "the plan decides",
                help_line="leave it out, also in `accelerate config`; the plan's own is:  "
                f"{instead}",
            )
    complete, device = started(settings)
    return complete, as_one_process(device)


def read_everywhere(accelerator: Accelerator) -> None:
    """Let each rank read its data itself. Of a data set without a length Accelerate lets the first
    rank read, and the others wait for batches that are sent in a job of several processes alone."""
    accelerator.dataloader_config.dispatch_batches = False


class Stream(DataLoaderShard):
    """A prepared loader of a data set without a length. The rows of its last batch are counted, to
    which `gather_for_metrics` cuts, as where the first rank reads for all."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.end_of_dataloader:
                self.remainder = find_batch_size(batch) or -1
            yield batch


def counted(loader: Any) -> Any:
    """A prepared loader that knows the rows of its last batch."""
    if not isinstance(loader, DataLoaderShard) or not isinstance(loader.dataset, IterableDataset):
        return loader
    stream = object.__new__(Stream)
    vars(stream).update(vars(loader))
    return stream


def as_one_process(device: torch.device) -> PartialState:
    """Accelerate's state of a job with one process, on `device`, that keeps this rank's number.

    A state that exists is replaced: an `Accelerator` made before does not follow.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    AcceleratorState._reset_state(reset_partial_state=True)
    with _without_launcher():
        state = PartialState(cpu=device.type == "cpu")
    state.device = device
    if dist.is_initialized():
        state.process_index, state.local_process_index = dist.get_rank(), local
    return state


@contextmanager
def _without_launcher() -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
