"""Memory, descriptors and threads over 500 steps on 4 processes, with saves and evaluations.

    python -m benchmarks.soak.steady

Asynchronous saves and evaluations every 50 steps. What each process holds at step 100, after
everything happened twice, is compared with the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.functional import mse_loss

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from benchmarks.soak.network import PLANS, batch, build

DEVICES, EVERY, WARM = 4, 50, 100
BAR_MIB = 4.0
"""Growth of a process's memory in 400 steps that allocators alone explain."""


def threads() -> int:
    """Threads of this process: the least of some moments, as one that was joined leaves the list of
    the system a moment later."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def held() -> dict[str, float]:
    """Of this process: resident MiB, open descriptors, threads."""
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return {
        "resident_mib": round(resident / 1024, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threads(),
        "python_threads": threading.active_count(),
    }


def train(steps: int, folder: str) -> list[dict[str, float]]:
    """What this process holds after every 50th step."""
    model, optimizer = build(dropout=0.2)
    graphaccel.optimize(
        model, optimizer, loss_fn=mse_loss, devices=DEVICES, example_batch=batch(0), **PLANS[4]
    )
    results = []
    saved = None
    for step in range(1, steps + 1):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        done = graphaccel.save(
            folder, model, optimizer, step=step, every=EVERY, keep=2, asynchronous=True
        )
        if done is None:
            continue
        saved = done
        model.eval()
        with torch.no_grad():
            model(*batch(step)).item()
        model.train()
        saved.wait()
        results.append(held())
    return results


def main() -> int:
    """Print the figures as JSON, and keep them; 1 if something grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args().steps
    folder = os.environ.setdefault("SOAK_FOLDER", tempfile.mkdtemp(prefix="graphaccel_"))
    mine = train(steps, folder)
    ranks: list[Any] = [None] * DEVICES
    dist.all_gather_object(ranks, mine)
    first, last = WARM // EVERY - 1, steps // EVERY - 1
    grown = {
        key: max(round(rank[last][key] - rank[first][key], 1) for rank in ranks) for key in mine[0]
    }
    failed = (
        grown["resident_mib"] > BAR_MIB or max(grown[k] for k in mine[0] if k != "resident_mib") > 0
    )
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder)
        figures = {
            "steps": steps, "devices": DEVICES, "saves_and_evaluations_every": EVERY,
            "machine": processor(), "torch": torch.__version__,
            "grown_from_step_100": grown, "every_50_steps_by_rank": ranks,
        }  # fmt: skip
        (RESULTS / "soak_steady.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps({k: v for k, v in figures.items() if not k.startswith("every")}, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
