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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphaccel
from graphaccel.api import cluster_here
from graphaccel.capture.batch import Batch, resized
from graphaccel.capture.export.export import OUTSIDE, find_loss
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
    with tempfile.TemporaryDirectory(prefix="graphaccel_") as folder:
        saved, out = Path(folder, "plan.json"), Path(folder, "measured.json")
        plan.save(saved)
        file, function = target
        job = [str(file), *(["--function", function] if function else [])]
        sizes = (
            ["--batch", json.dumps([batch[0], [*batch[1].items()]])] if batch is not None else []
        )
        worker = [*job, *sizes, "--plan", str(saved), "--steps", str(steps), "--out", str(out)]
        launcher = [sys.executable, "-m", "graphaccel.runtime.launch", str(plan.devices)]
        code = subprocess.run(
            [*launcher, sys.executable, "-u", "-m", "graphaccel.cli.measure", *worker],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "GRAPHACCEL_QUIET": "1"},
            check=False,
        ).returncode
        if code:
            raise GraphMisuse(what=f"the measured run ended with exit code {code}")
        result = json.loads(out.read_text())
    return Measured(
        steps=steps,
        seconds=statistics.median(result["seconds"]),
        fastest=min(result["seconds"]),
        slowest=max(result["seconds"]),
        memory=tuple(result["memory"]),
        host=tuple(result["host"]),
        where=_machine(plan.devices),
        optimizer=statistics.median(result["optimizer"]),
    )


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


def _machine(devices: int) -> str:
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
    plan = Plan.from_json(args.plan.read_text())
    graphaccel.optimize(  # type: ignore[call-overload]
        model, optimizer, loss_fn=job.loss_fn, plan=plan, batch_dims=job.batch_dims
    )
    outside = job.loss_fn == OUTSIDE
    del job, batch  # their tensors are not part of a training step

    def run() -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        _loss_in(model(*inputs, **named), outside).backward()

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
    rank = int(os.environ.get("RANK", "0"))
    stage = coordinates(plan.sizes, rank)["pipeline"]
    mine = stage, seconds, changing, *_peaks(step, model)
    everyone: list[Any] = [mine] * plan.devices
    if plan.devices > 1:
        dist.all_gather_object(everyone, mine)
    if rank == 0:
        slowest, stepping = (
            [max(times) for times in zip(*(one[place] for one in everyone), strict=True)]
            for place in (1, 2)
        )
        memory, host = (
            [max(one[place] for one in everyone if one[0] == n) for n in range(plan.pipeline)]
            for place in (3, 4)
        )
        said = {"seconds": slowest, "optimizer": stepping, "memory": memory, "host": host}
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
    meter = PeakMeter(resident, host=model.graphaccel.host_tensors())  # type: ignore[operator, union-attr]
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
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    _work(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
