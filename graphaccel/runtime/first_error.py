"""Says an error that all ranks of a machine have once: its first rank does, where it has the same.

What a rank can not do with the files it is given, or a plan that does not fit, is an error of each.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from graphaccel.runtime.launch import STOPPED_FILE

_SECONDS, _PAUSE = 3.0, 0.05


def said_by_first(text: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the first rank of this machine says this error, so that this one need not; under
    another launcher than ours, whether any rank before this one does.

    Waits some seconds for it: a rank that fails alone is not long in saying so. The launcher stops
    the others when one ends, also while they wait here.
    """
    stopped, rank = environment.get(STOPPED_FILE), environment.get("LOCAL_RANK")
    if stopped is None:
        return _said_before(text, environment)
    if rank is None or not Path(stopped).parent.is_dir():  # no rank, or alone
        return False
    file = Path(stopped).with_name("error")
    if rank == "0":
        part = file.with_suffix(".part")
        part.write_text(text)
        part.replace(file)
        return False
    end = time.monotonic() + _SECONDS
    while not file.exists() and time.monotonic() < end:
        time.sleep(_PAUSE)
    return file.exists() and file.read_text() == text


def _said_before(text: str, environment: Mapping[str, str]) -> bool:
    """Whether a rank before this one says this error, by the store of the job."""
    rank, world = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if not (rank.isdigit() and world.isdigit()) or int(world) == 1:
        return False
    key = "graphaccel/said/" + hashlib.sha256(text.encode()).hexdigest()[:16]
    with suppress(RuntimeError, ValueError):  # the store is gone, or nothing says where it is
        store = _store(environment)
        store.set(f"{key}/{rank}", "")
        end = time.monotonic() + (_SECONDS if int(rank) else 0.0)
        while time.monotonic() < end:
            if any(store.check([f"{key}/{earlier}"]) for earlier in range(int(rank))):
                return True
            time.sleep(_PAUSE)
    return False


def _store(environment: Mapping[str, str]) -> Any:
    """The store of the process group, or else that of torchrun's agent."""
    import torch.distributed as dist

    from graphaccel.compat.torch.distributed import default_store

    if dist.is_initialized():
        return default_store()
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("no store yet")
    address, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", ""))
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_SECONDS))
    return dist.PrefixStore(f"graphaccel/{attempt}", store)
