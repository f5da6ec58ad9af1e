"""Training scripts in a worker of the pool: as functions, and whole files.

As a function a script gets what stands in for its `optimize` line, and yields what it computes.
"""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import graphaccel

TWO = {
    "data": {"data": 2},
    "zero1": {"data": 2, "zero": 1},
    "zero3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}
"""Plans of two devices by name: their pins."""

Wrap = Callable[..., Any]
Script = Callable[[Wrap], Iterator[Tensor]]


def plans_of_two(*names: str) -> dict[str, dict[str, Any]]:
    """The pins of some plans of two devices, by name."""
    return {name: dict(TWO[name]) for name in names}


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers in full, plain or optimized. Collective."""
    yield from graphaccel.full_state_dict(model).values()


def furthest(script: Script, pins: dict[str, Any]) -> float:
    """Largest difference of what the script yields between plain PyTorch and `optimize(**pins)`,
    relative to the plain value where that is larger than one."""

    def plain(model: nn.Module, *rest: Any) -> Any:
        return (model, *rest) if rest else model

    def ours(model: nn.Module, *rest: Any) -> Any:
        return graphaccel.optimize(model, *rest, **pins)

    results = []
    for wrap in (plain, ours):
        torch.manual_seed(0)
        results.append([value.detach().double().clone() for value in script(wrap)])
    pairs = list(zip(*results, strict=True))
    return max(float(((a - b).abs() / a.abs().clamp(min=1)).max()) for a, b in pairs)


def run_as_rank(path: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Run the file `path` as a program on this rank, from its own folder as Python does; returns
    what it prints. The worker has imported torch, which takes a new process seconds."""
    folder, printed = Path(path).parent, io.StringIO()
    with (
        patch.object(sys, "argv", [path, *arguments]),
        patch.object(sys, "path", [str(folder), *sys.path]),
        patch.dict("os.environ", environment),
        redirect_stdout(printed),
        torch.random.fork_rng(devices=[]),
    ):
        runpy.run_path(path, run_name="__main__")
    for file in folder.glob("*.py"):  # imported by bare name: other scripts have files so called
        sys.modules.pop(file.stem, None)
    return printed.getvalue()
