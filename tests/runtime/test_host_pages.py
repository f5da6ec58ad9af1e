"""Freed memory of the host stays with the process, unless the environment says otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import graphaccel

MODULE = Path(graphaccel.__file__).parent / "runtime" / "host_memory" / "reuse.py"
BYTES = 64 << 20

# Alone, without torch: a block is written, freed, and asked for again.
SCRIPT = f"""
import ctypes, resource, runpy
kept = runpy.run_path({str(MODULE)!r})["keep_pages"]()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(ctypes.c_size_t({BYTES}))
    ctypes.memset(block, 1, {BYTES})
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(kept, faults(), faults())
"""


def has_mallopt() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")


glibc = pytest.mark.skipif(not has_mallopt(), reason="mallopt is glibc's")


def run(extra: Mapping[str, str]) -> tuple[bool, int, int]:
    """What `keep_pages` said, and the page faults of the first and the second block."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    plain.pop("GRAPHACCEL_KEEP_PAGES", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**plain, **extra}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    kept, first, second = done.stdout.split()
    return kept == "True", int(first), int(second)


@glibc
def test_a_block_is_taken_again_without_a_page_fault() -> None:
    kept, first, second = run({})
    assert kept
    assert first > 20  # pages of 4 KiB, or of 2 MiB where the system takes those by itself
    assert second <= 8


@glibc
@pytest.mark.parametrize(
    "said",
    [
        {"GRAPHACCEL_KEEP_PAGES": "0"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_the_environment_says_of_memory_is_left_alone(said: dict[str, str]) -> None:
    kept, first, second = run(said)
    assert not kept
    assert second > first // 2  # the block went back to the system


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphaccel.runtime.host_memory import reuse as host_pages

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not host_pages.keep_pages()
