"""`graphaccel plan --measure N`: runs the plan on this machine and reports time and memory.

The plan is run as `optimize(model, plan=...)` runs it, one process for each device, on the example
batch: its floating-point values are made random, other values (tokens, labels) are kept, since
their valid range is not known. A model on the meta device is given random weights. Where the script
computes the loss, the sum of the outputs replaces it. Nothing is saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphaccel
from graphaccel.api import cluster_here
from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.export.export import OUTSIDE, find_loss, with_loss
from graphaccel.capture.export.outputs import flatten_output
from graphaccel.cli.jobs import Job, find_job
from graphaccel.errors import GraphMisuse
from graphaccel.planner.plan.axis_order import coordinates
from graphaccel.planner.plan.plan import Plan
from graphaccel.report.facts import Measured
from graphaccel.runtime.launch import check_devices
from graphaccel.runtime.meter import PeakMeter

_APART = 3  # runs of the optimizer's step that are timed separately
_WARM = 2  # steps before timing: the first creates optimizer state and opens connections


def measure(
    target: tuple[Path, str | None],
    plan: Plan,
    batch: tuple[int, Mapping[int, int]] | None,
    steps: int,
) -> Measured:
    """Run `steps` steps of `plan` for the model of `target` on this machine.

    batch: global batch size where it is not the example's, and the batch dims of the inputs.
    Raises GraphMisuse (GA407) for a plan for other devices than this machine's, and for a run that
    fails (its own error is on stderr); TooManyDevices (GA205).
    """
    check_here(plan.cluster, plan.devices)
    run = run_apart(target, plan, batch, steps)
    return Measured(
        steps=steps,
        seconds=statistics.median(run.seconds),
        fastest=min(run.seconds),
        slowest=max(run.seconds),
        memory=run.memory,
        host=run.host,
        where=machine(plan.devices),
        optimizer=statistics.median(run.optimizer),
    )


@dataclass(frozen=True)
class Run:
    """Seconds of each step on the slowest rank, of the optimizer's step alone, and the peak bytes
    on device and host of each pipeline rank."""

    seconds: tuple[float, ...]
    optimizer: tuple[float, ...]
    memory: tuple[int, ...]
    host: tuple[int, ...]


def run_apart(
    target: tuple[Path, str | None],
    plan: Plan | None,
    batch: tuple[int, Mapping[int, int]] | None,
    steps: int,
) -> Run:
    """Run `steps` steps of a plan, or of plain PyTorch on one device, in processes of their own.

    batch: as for `measure`. Raises GraphMisuse (GA407) for a run that fails.
    """
    devices = 1 if plan is None else plan.devices
    with tempfile.TemporaryDirectory(prefix="graphaccel_") as folder:
        out = Path(folder, "measured.json")
        file, function = target
        worker = [str(file), *(["--function", function] if function else [])]
        if batch is not None:
            worker += ["--batch", json.dumps([batch[0], [*batch[1].items()]])]
        if plan is not None:
            plan.save(Path(folder, "plan.json"))
            worker += ["--plan", str(Path(folder, "plan.json"))]
        worker += ["--steps", str(steps), "--out", str(out)]
        launcher = [sys.executable, "-m", "graphaccel.runtime.launch", str(devices)]
        code = subprocess.run(
            [*launcher, sys.executable, "-u", "-m", "graphaccel.cli.measure", *worker],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "GRAPHACCEL_QUIET": "1"},
            check=False,
        ).returncode
        if code:
            raise GraphMisuse(what=f"the measured run ended with exit code {code}")
        return Run(**{name: tuple(values) for name, values in json.loads(out.read_text()).items()})


def check_here(cluster: str, devices: int) -> None:
    """Check that plans for `cluster` (`planner.cluster.cluster.cluster_name`) can run on this
    machine.

    Raises GraphMisuse (GA407) for other devices than this machine's, TooManyDevices (GA205).
    """
    here = cluster_here(devices, _device()).device.name
    if cluster != f"{devices} x {here}":
        raise GraphMisuse(
            what=f"--measure runs on this machine, which is {here}, and the plan is for {cluster}",
            help_line=f"--device {here}, or leave --measure out",
        )
    check_devices(devices)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def machine(devices: int) -> str:
    """What a run was on, in words."""
    if _device().type == "cuda":
        return f"{devices} x {torch.cuda.get_device_name()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{devices} process{'es' if devices > 1 else ''} on {cores} CPU cores"


def materialise(job: Job) -> None:
    """Give a model on the meta device random weights, in place; its optimizer's groups are
    preserved."""
    tensors = (*job.model.parameters(), *job.model.buffers())
    if not any(t.is_meta for t in tensors):
        return
    before = {id(p): name for name, p in job.model.named_parameters()}
    job.model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*job.model.parameters(), *job.model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.zero_()
    if job.optimizer is not None:
        now = dict(job.model.named_parameters())
        for group in job.optimizer.param_groups:
            group["params"] = [now[before[id(p)]] for p in group["params"]]


def random_batch(batch: Batch) -> Batch:
    """The batch with random floating-point values; other values unchanged, or zeros where on meta.
    On this process's device, as `optimize` puts the model there."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    device = device if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)

    def built(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(device)
        return torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.to(device)

    return Batch(tuple(built(leaf) for leaf in batch.leaves), batch.names, batch.spec)


def _work(args: argparse.Namespace) -> None:
    """One rank's part; rank 0 writes the result."""
    job = find_job(args.file, args.function)
    materialise(job)
    batch = job.batch
    if args.batch is not None:
        size, dims = json.loads(args.batch)
        batch = resized(batch, dict(dims), size)
    batch = random_batch(batch)
    inputs, named = batch.rebuild(batch.leaves)
    model, optimizer = job.model, job.optimizer
    forward = _prepared(args.plan, job)
    outside = job.loss_fn == OUTSIDE
    del job, batch  # their tensors are not part of a training step

    def run() -> None:
        (model if optimizer is None else optimizer).zero_grad()
        _loss_in(forward(*inputs, **named), outside).backward()

    def step() -> None:
        run()
        if optimizer is not None:
            optimizer.step()

    for _ in range(_WARM):
        step()
    seconds = [_timed(step) for _ in range(args.steps)]
    changing = [0.0]
    if optimizer is not None:
        changing = [_timed(optimizer.step, before=run) for _ in range(_APART)]
    _write(args, (seconds, changing, *_peaks(step, model)))


def _prepared(file: Path | None, job: Job) -> Callable[..., Any]:
    """The model under the plan of a file, as the training loop calls it; without one as it is."""
    if file is not None:
        graphaccel.optimize(  # type: ignore[call-overload]
            job.model, job.optimizer, loss_fn=job.loss_fn, plan=Plan.from_json(file.read_text()),
            batch_dims=job.batch_dims,
        )  # fmt: skip
        return job.model
    if job.loss_fn is None or job.loss_fn == OUTSIDE:
        return job.model
    return with_loss(job.model, job.loss_fn)


def _write(args: argparse.Namespace, mine: tuple[list[float], list[float], int, int]) -> None:
    """Write what this rank and the others measured, from rank 0."""
    rank = int(os.environ.get("RANK", "0"))
    plan = None if args.plan is None else Plan.from_json(args.plan.read_text())
    stage = 0 if plan is None else coordinates(plan.sizes, rank)["pipeline"]
    own = stage, *mine
    everyone: list[Any] = [own] * (1 if plan is None else plan.devices)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    if rank == 0:
        slowest, stepped = (
            [max(times) for times in zip(*(one[place] for one in everyone), strict=True)]
            for place in (1, 2)
        )
        stages = range(1 if plan is None else plan.pipeline)
        memory, host = (
            [max(one[place] for one in everyone if one[0] == n) for n in stages] for place in (3, 4)
        )
        said = {"seconds": slowest, "optimizer": stepped, "memory": memory, "host": host}
        args.out.write_text(json.dumps(said))


def _loss_in(output: Any, outside: bool) -> torch.Tensor:
    """The model's loss; the sum of its outputs where the script computes the loss, which is not
    known."""
    loss = None if outside else find_loss(output)
    if loss is not None:
        return loss
    tracked = (x for x in flatten_output(output)[0] if isinstance(x, torch.Tensor))
    sums = [x.sum() for x in tracked if x.requires_grad]
    if not sums:
        raise GraphMisuse(
            what="--measure runs a step of training, and no output of the model has a gradient"
        )
    return torch.stack(sums).sum()


def _timed(step: Callable[[], Any], before: Callable[[], None] = lambda: None) -> float:
    before()
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _peaks(step: Callable[[], None], model: nn.Module) -> tuple[int, int]:
    """Peak bytes of tensors on this rank's device and host in one more step."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter)
    cuda = torch.cuda.is_available()
    resident = (x for x in gc.get_objects() if type(x) in kinds and not cuda)
    handle: Any = getattr(model, "graphaccel", None)
    meter = PeakMeter(resident, host=handle.host_tensors() if handle is not None else ())
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with meter:  # nothing here may hold what the step frees
        step()
    return torch.cuda.max_memory_allocated() if cuda else meter.peak, meter.host_peak


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m graphaccel.cli.measure", allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--function")
    parser.add_argument("--batch", help="JSON of the size, and of pairs of leaf and dim")
    parser.add_argument("--plan", type=Path, help="else plain PyTorch")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    _work(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
