"""Makes the C library keep host memory that a step frees, for the next step to reuse.

glibc returns freed memory to the system: that of large tensors immediately, of others when enough
is free at the end of its heap. Each page then has to be zeroed and mapped anew in every step, which
takes up to a fifth of small models' steps (`python -m benchmarks.host_pages`), and varies between
processes with the layout of their heaps. A step needs its peak memory in every step, so it is kept,
as CUDA's caching allocator does. Some memory stays unused between blocks that are kept: the system
may show a tenth more. https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt
_NEVER = 2**31 - 1
KEEP = "GRAPHACCEL_KEEP_PAGES"


def keep_pages() -> bool:
    """Make the C library of this process keep freed memory from now on; returns whether it does.

    Does nothing where the environment configures memory itself (`MALLOC_*`, glibc's tunables,
    ``GRAPHACCEL_KEEP_PAGES=0``), and with C libraries without `mallopt`.
    """
    said = any(name.startswith("MALLOC_") for name in os.environ)
    said = said or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or said or os.environ.get(KEEP) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_MAX, 0))
