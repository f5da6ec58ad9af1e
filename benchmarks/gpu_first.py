"""The first ten minutes of a GPU: what has to be known of it, most important first.

    python -m benchmarks.gpu_first          9 minutes; writes benchmarks/results/gpu_first.json
    python -m benchmarks.gpu_first --dry    the same code at toy sizes on the CPU; writes nothing

The file is written after each part, as a machine may be taken away. A part that fails is a fault,
and the next one runs; at the limit the part that runs is stopped, and the others are left out.
Without a GPU it says so and measures nothing; the exit code is then 1, as it is with a fault.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import REAL, TOY, _batch, _model, machine
from benchmarks.shared.common import RESULTS
from benchmarks.shared.gpu_kernels import Scale, attention_faults, compiled, seconds, with_kernels
from graphaccel.kernels.check.numbers import check_numbers
from graphaccel.kernels.register import op_of
from graphaccel.kernels.registry import fusion_named

LIMIT_S, MODEL, TOP = 540.0, "gpt2", 20
SIDES = ("compile", "graphaccel", "graphs")
WAITS = ("Synchronize", "DtoH", "aten::item", "aten::nonzero")
Row = dict[str, Any]
Part = Callable[[Scale], Row]


def step_of(side: str, scale: Scale, rows: int | None = None) -> tuple[Any, Callable[[], None]]:
    """A model and its training step: by torch.compile with AdamW(fused=True), by graphaccel
    compiled by Inductor, or ("graphs") with its actions recorded as CUDA graphs too."""
    _, model = _model(MODEL, scale, scale.device)
    batch = _batch(MODEL, scale)
    if rows is not None:
        batch = {k: v[:1].repeat(rows, *(1 for _ in v.shape[1:])) for k, v in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ours, call = side != "compile", model
    if ours:
        import graphaccel

        kind = "off" if scale.toy else "inductor"
        call, optimizer = graphaccel.optimize(
            model, optimizer, example_batch=batch, precision="bf16", fusions="auto", compile=kind,
            cuda_graphs=side == "graphs" and not scale.toy,
        )  # fmt: skip
    elif not scale.toy:
        call = compiled(model)

    def step() -> None:
        with torch.autocast(scale.device, torch.bfloat16, enabled=not ours):
            loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def wait(scale: Scale) -> None:
    """Until the device has done everything."""
    if scale.device == "cuda":
        torch.cuda.synchronize()


def profiled(scale: Scale) -> Row:
    """Kernel time against wall time of a step, the longest kernels, and what waits for the device;
    of torch.compile and of ours."""
    found: Row = {}
    for side in SIDES[:2]:
        _, step = step_of(side, scale)
        for _ in range(3):
            step()
        wait(scale)
        start = time.perf_counter()
        with torch.profiler.profile() as profile:
            step()
            wait(scale)
        wall = time.perf_counter() - start
        events = profile.key_averages()
        on = "self_device_time_total" if scale.device == "cuda" else "self_cpu_time_total"
        longest = sorted(events, key=lambda e: -getattr(e, on))
        found[side] = {
            "wall": wall,
            "kernels": sum(getattr(e, on) for e in events) / 1e6,
            "launches": sum(e.count for e in events if "LaunchKernel" in e.key),
            "longest": [(e.key, e.count, getattr(e, on) / 1e6) for e in longest[:TOP]],
            "waits": {e.key: e.count for e in events if any(w in e.key for w in WAITS)},
        }
    return found


def host_time(scale: Scale) -> Row:
    """Seconds until the call of a step returns, and until its work is done."""
    found: Row = {}
    for side in SIDES:
        _, step = step_of(side, scale)
        for _ in range(4):
            step()
        returned, done = [], []
        for _ in range(3 if scale.toy else 20):
            wait(scale)
            start = time.perf_counter()
            step()
            returned.append(time.perf_counter() - start)
            wait(scale)
            done.append(time.perf_counter() - start)
        found[side] = {"returns": min(returned), "done": min(done)}
    return found


def recorded(scale: Scale) -> Row:
    """What the report says of CUDA graphs, and whether steps with them give finite gradients."""
    model, step = step_of("graphs", scale)
    for _ in range(5):
        step()
    lines = [line for line in model.graphaccel.report().splitlines() if "CUDA graphs" in line]
    return {"report": lines, "finite": all(bool(p.isfinite().all()) for p in model.parameters())}


def head_by_chunk(scale: Scale) -> Row:
    """Seconds of the fused head and loss of GPT-2, by tokens of a chunk."""
    tokens, width, words = (64, 32, 128) if scale.toy else (8192, 768, 50257)
    kind = torch.float32 if scale.toy else torch.bfloat16
    x = torch.randn(tokens, width, device=scale.device, dtype=kind)
    weight = torch.randn(words, width, device=scale.device, dtype=kind)
    target = torch.randint(words, (tokens,), device=scale.device)
    head = op_of(fusion_named("linear_cross_entropy"))
    chunks = [tokens >> n for n in range(5)]
    return {str(n): seconds(lambda n=n: head(x, weight, None, target, -100, n), scale)
            for n in chunks}  # fmt: skip


def attention_backends(scale: Scale) -> Row:
    """Seconds of causal attention of GPT-2, forward and backward, by FlashAttention and cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = (2, 2, 16, 16) if scale.toy else (8, 12, 1024, 64)
    kind = torch.float32 if scale.toy else torch.bfloat16
    leaves = [torch.randn(shape, device=scale.device, dtype=kind, requires_grad=True)
              for _ in range(3)]  # fmt: skip
    found: Row = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def run(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                y: Tensor = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=True
                )
            torch.autograd.grad(y, leaves, torch.ones_like(y))

        try:
            found[backend.name] = seconds(run, scale)
        except RuntimeError as error:
            found[backend.name] = str(error).splitlines()[0]
    return found


def steps(scale: Scale) -> Row:
    """Seconds of a training step and tokens a second, at 8 and 64 rows of 1024 tokens."""
    found: Row = {}
    for rows in (2,) if scale.toy else (8, 64):
        for side in SIDES:
            gc.collect()
            _, step = step_of(side, scale, rows)
            took = seconds(step, scale)
            tokens = rows * _batch(MODEL, scale)["input_ids"].shape[1]
            found[f"{side} {rows}"] = {"seconds": took, "tokens a second": tokens / took}
    return found


_NCCL = """
import sys, torch, torch.distributed as dist
rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=world)
x = torch.full((1 << 20,), float(rank + 1), device="cuda")
dist.all_reduce(x)
assert x.eq(world * (world + 1) / 2).all()
dist.destroy_process_group()
"""


def nccl(scale: Scale) -> Row:
    """Whether two processes on one GPU sum over NCCL, which it may refuse, and one alone."""
    if scale.device != "cuda":
        return {"left out": "NCCL needs a GPU"}
    found: Row = {}
    for world in (2, 1):
        file = Path(f"/tmp/graphaccel-nccl-{time.time_ns()}")
        command = [sys.executable, "-c", _NCCL]
        ranks = [
            subprocess.Popen([*command, str(r), str(world), str(file)], stderr=subprocess.PIPE,
                             text=True)
            for r in range(world)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=60)[1] for rank in ranks]
            ran = all(rank.returncode == 0 for rank in ranks)
            found[f"world {world}"] = "ran" if ran else said[0].strip().splitlines()[-1]
        except subprocess.TimeoutExpired:
            found[f"world {world}"] = "did not answer in 60 s"
        finally:
            for rank in ranks:
                rank.kill()
            file.unlink(missing_ok=True)
    return found


def faults(scale: Scale) -> Row:
    """What is wrong with attention of graphs, and with every fused op that has kernels."""
    names = [f.name for f in with_kernels(None)][: 1 if scale.toy else None]
    found = {name: [f"{f.what} in {f.case}" for f in check_numbers(fusion_named(name),
             scale.device)[1]] for name in names}  # fmt: skip
    own = attention_faults(scale.device)
    return {"attention": [str(f) for f in own], **found}


PARTS: Mapping[str, Part] = {
    "profile": profiled,
    "host time": host_time,
    "CUDA graphs": recorded,
    "head by chunk": head_by_chunk,
    "attention": attention_backends,
    "steps": steps,
    "NCCL": nccl,
    "faults": faults,
}


def run_parts(
    parts: Mapping[str, Part], scale: Scale, limit: float, keep: Callable[[Row], None]
) -> Row:
    """Every part's row, or how it failed; `keep` is called with all of them after each."""
    start, found = time.monotonic(), {}
    for name, part in parts.items():
        began = time.monotonic()
        rest = limit - (began - start)
        if rest <= 0:
            found[name] = {"left out": f"{began - start:.0f} s had passed"}
        else:
            found[name] = {**_tried(part, scale, rest), "took": time.monotonic() - began}
        print(f"{name}: {json.dumps(found[name], default=str)[:300]}", flush=True)
        keep(found)
    return found


def _tried(part: Part, scale: Scale, rest: float) -> Row:
    """A part's row, or how it failed. rest: seconds after which it is stopped."""

    def stop(*_: Any) -> None:
        raise TimeoutError("no time is left")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, rest)
    try:
        return part(scale)
    except Exception as error:  # whatever a GPU raises: the next part runs
        first = (str(error).splitlines() or [""])[0]
        return {"failed": f"{type(error).__name__}: {first}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and save. 1 without a GPU, or where a part failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_first", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args(argv)
    if not given.dry and not torch.cuda.is_available():
        print(f"no CUDA device here: nothing was measured (torch {torch.__version__})")
        return 1
    scale = TOY if given.dry else replace(REAL, models=(MODEL,))
    result: Row = {"command": "python -m benchmarks.gpu_first", "machine": machine(scale)}

    def keep(found: Row) -> None:
        if not given.dry:
            text = json.dumps({**result, "parts": found}, indent=1, default=str)
            (RESULTS / "gpu_first.json").write_text(text + "\n")

    found = run_parts({n: PARTS[n] for n in given.parts}, scale, LIMIT_S, keep)
    return 1 if any("failed" in row for row in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
