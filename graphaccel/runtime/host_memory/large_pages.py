"""Host memory in large pages, for tensors that are read and written entirely in every step.

Linux maps memory in pages of 4 KiB. Hardware prefetching ends at a page boundary and the TLB covers
few pages, so passes over gigabytes take longer than the memory bandwidth allows. Where the system
gives pages of 2 MiB on request (`transparent_hugepage` set to `madvise`, as most distributions have
it), a mapping that requests them is backed by them.
https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 2**25
"""Total bytes from which tensors are worth a mapping: less fits into caches."""
_ALIGNED = 64  # as in torch's own allocations


def zeros_like_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros as `torch.zeros_like` gives them for each tensor, side by side in large pages where
    they are on the host, contiguous, `LARGE` bytes in total and the system has such pages.

    Each has a storage of its own. The memory is freed once none of them is used.
    """
    sizes = [-(-t.numel() * t.element_size() // _ALIGNED) * _ALIGNED for t in tensors]
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not plain or sum(sizes) < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return [torch.zeros_like(t, memory_format=torch.preserve_format) for t in tensors]
    memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: ordinary pages
    built, start = [], 0
    for t, size in zip(tensors, sizes, strict=True):
        if t.numel():
            flat = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=start)
        else:
            flat = torch.zeros_like(t)
        built.append(flat.view(t.shape))
        start += size
    return built
