"""Host memory that a step lets go of stays with the process, for the next step to take again.

glibc gives freed memory back to the system: that of large tensors at once, of others when enough
lies free at its heap's end. Each page then has to be zeroed and mapped anew in every step, which
takes up to a fifth of small models' steps (`python -m benchmarks.host_pages`), differing from
process to process by how their memory came to lie. What a step needs at its peak it needs in every
step, as CUDA's caching allocator has it. Between blocks that are kept some memory lies idle: the
system may show a tenth more. https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt
_NEVER = 2**31 - 1
KEEP = "GRAPHACCEL_KEEP_PAGES"


def keep_pages() -> bool:
    """Have the C library keep freed memory from now on, in this whole process; whether it does.

    Left alone where the environment says how memory is to be handled (`MALLOC_*`, glibc's tunables,
    ``GRAPHACCEL_KEEP_PAGES=0``), and by C libraries without `mallopt`.
    """
    said = any(name.startswith("MALLOC_") for name in os.environ)
    said = said or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or said or os.environ.get(KEEP) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_MAX, 0))
