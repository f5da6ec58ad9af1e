"""Recognises that a device ran out of memory, and says how much of it is in use."""

from __future__ import annotations

import os

import torch

from graphaccel.errors import DeviceOutOfMemory
from graphaccel.runtime.execution.lost_rank import described
from graphaccel.schedule.table import Action


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator, of a GPU or of the host, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def out_of_memory(
    action: Action | None, device: torch.device, doing: str = "the end of a step"
) -> DeviceOutOfMemory:
    """The error, without what was predicted. action: which one ran; doing: what did where none."""
    stage = 0 if action is None else action.stage
    doing = doing if action is None else described(action)
    return DeviceOutOfMemory(
        stage=stage,
        action=doing.removesuffix(f", stage {stage}"),
        predicted={},
        actual=_in_use(device),
    )


def _in_use(device: torch.device) -> dict[str, int]:
    """Bytes of the device in tensors, elsewhere and free; of a host those that are free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        tensors = torch.cuda.memory_allocated(device)
        return {"tensors": tensors, "other": total - free - tensors, "free": free}
    return {"free": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")}
