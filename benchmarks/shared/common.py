"""What all benchmarks share: the model, the interleaved timing, the result file.

Two sides that do the same training steps are timed in turn (A, B, B, A, A, B, ...) in one run on
the same processes, so that a busy machine slows both. Only ratios are worth quoting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import AdamW, Optimizer

from tests.support.gpt import GPT
from tests.support.pool import Pool

RESULTS = Path(__file__).parents[1] / "results"
OURS = "graphaccel"
RUN_LIMIT_S = 3600.0

Step = Callable[[], float]
Sides = Mapping[str, Step]


@dataclass(frozen=True)
class Settings:
    """Model and timing of one benchmark; `only` names the one side to run, for profiling.

    onednn: 0 takes oneDNN from both sides, so that their products are by the same library.
    """

    layers: int = 6
    width: int = 256
    heads: int = 4
    vocabulary: int = 1024
    tokens: int = 128
    batch: int = 8
    microbatches: int = 4
    threads: int = 1
    rounds: int = 7
    steps: int = 3
    onednn: int = 1
    only: str | None = None


def processor() -> str:
    """The name of this machine's processor, as Linux says it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def machine() -> dict[str, Any]:
    """What figures hold on: processor, Python and torch."""
    return {
        "cores": os.cpu_count(),
        "processor": processor(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def make_model(settings: Settings, tied: bool = True) -> GPT:
    """A GPT from a fixed seed, the same on every rank; untied, the head has a weight of its own."""
    torch.manual_seed(1)
    model = GPT(
        settings.vocabulary, settings.tokens, settings.width, settings.heads, settings.layers
    )
    if not tied:
        model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    return model


def make_batch(settings: Settings) -> dict[str, Tensor]:
    """The global batch: int64 [batch, tokens] of inputs and labels, none ignored."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, settings.batch, settings.tokens)
    inputs, labels = torch.randint(settings.vocabulary, shape, generator=generator)
    return {"input_ids": inputs, "labels": labels}


def make_optimizer(model: nn.Module) -> Optimizer:
    """The optimizer of both sides."""
    return AdamW(model.parameters(), lr=1e-4)


def our_step(model: nn.Module, batch: dict[str, Tensor], **pins: Any) -> Step:
    """One training step by graphaccel with this plan."""
    import graphaccel

    model, optimizer = graphaccel.optimize(
        model, make_optimizer(model), example_batch=batch, **pins
    )

    def step() -> float:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def share_of(settings: Settings, world: int) -> dict[str, Tensor]:
    """This rank's part of the global batch, for those that take parts."""
    return {key: value.chunk(world)[dist.get_rank()] for key, value in make_batch(settings).items()}


def data_step(model: nn.Module, optimizer: Optimizer, share: dict[str, Tensor]) -> Step:
    """One training step of a data-parallel model on this rank's part of the batch.

    The loss a user prints is that of the global batch: graphaccel's is, so this one is too.
    """

    def step() -> float:
        loss = model(**share)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    return step


def time_data_parallel(
    settings: Settings,
    world: int,
    zero: int,
    name: str,
    theirs: Callable[[GPT], tuple[nn.Module, Optimizer]],
) -> dict[str, dict[str, Any]]:
    """graphaccel's data parallelism at a ZeRO level against that of another library, on this rank.

    Both take the same global batch, of which the other library's ranks run their part. name: of the
    other side. theirs: a model → the model as the library wraps it, and its optimizer.
    """

    def ours() -> Step:
        pins = {"pipeline": 1, "microbatches": 1, "recompute": "none", "precision": "fp32"}
        batch = make_batch(settings)
        return our_step(make_model(settings), batch, data=world, zero=zero, **pins)

    def wrapped() -> Step:
        return data_step(*theirs(make_model(settings)), share_of(settings, world))

    return time_sides(settings, {OURS: ours, name: wrapped})


def time_sides(
    settings: Settings, makers: Mapping[str, Callable[[], Step]]
) -> dict[str, dict[str, Any]]:
    """Run the sides in turn; for each its first loss and seconds per step of every round.

    `makers` set a side up outside the timing. A round's time is that of the slowest rank,
    from a barrier to the end of its last step, divided by the number of steps.
    """
    torch.set_num_threads(settings.threads)
    torch.backends.mkldnn.set_flags(bool(settings.onednn))
    chosen = [name for name in makers if settings.only in (None, name)]
    if not chosen:
        raise ValueError(f"no side named {settings.only!r}; there are {', '.join(makers)}")
    sides = {name: makers[name]() for name in chosen}
    first = {name: step() for name, step in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():  # warm up: optimizer state, caches of kernels
        step()
    for number in range(settings.rounds):
        for name in chosen if number % 2 == 0 else reversed(chosen):
            times[name].append(_time(sides[name], settings.steps))
    return {name: {"first_loss": first[name], "seconds": times[name]} for name in sides}


def _time(step: Step, steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    elapsed = torch.tensor((time.perf_counter() - start) / steps)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def run(
    name: str,
    world_size: int,
    worker: Callable[[Settings], dict[str, dict[str, Any]]],
    arguments: Sequence[str] | None = None,
) -> None:
    """Read the settings from the command line, run `worker` on every rank, print and save.

    Saves benchmarks/results/NAME.json (NAME-blas.json with --onednn 0), unless only one side was
    run. Raises AssertionError when the two sides do not start with the same loss.
    """
    settings = parse(name, arguments)
    pool = Pool(timeout_s=RUN_LIMIT_S)
    try:
        sides = pool.run(world_size, worker, settings)[0]
    finally:
        pool.close()
    medians = {side: statistics.median(found["seconds"]) for side, found in sides.items()}
    for side, median in medians.items():
        print(f"{side:24} {1e3 * median:8.1f} ms per step   first loss {sides[side]['first_loss']}")
    if settings.only is not None:
        return
    (other,) = (side for side in sides if side != OURS)
    losses = [found["first_loss"] for found in sides.values()]
    assert abs(losses[0] - losses[1]) <= 1e-4 * abs(losses[0]), f"different losses: {losses}"
    ratio = medians[OURS] / medians[other]
    print(f"ratio {ratio:.3f}  ({OURS} / {other}, medians of {settings.rounds} rounds)")
    started = sys.modules["__main__"].__spec__
    assert started is not None, "started by python -m"
    command = f"python -m {started.name}"
    if not settings.onednn:
        name, command = f"{name}-blas", f"{command} --onednn 0"
    result = {
        "name": name,
        "command": command,
        "ratio": ratio,
        "median_seconds": medians,
        "sides": sides,
        "processes": world_size,
        "settings": asdict(settings),
        "machine": machine(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def parse(name: str, arguments: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    for field, default in asdict(Settings()).items():
        kind = str if default is None else int
        parser.add_argument(f"--{field}", type=kind, default=default, help=f"default {default}")
    return Settings(**vars(parser.parse_args(arguments)))
