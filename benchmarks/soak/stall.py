"""How long an asynchronous save stops training, beside a save that waits for the disk.

    python -m benchmarks.soak.stall

Both kinds in turn, in one run, and medians of several runs; the first asynchronous save apart,
whose host memory was allocated in the background of the steps before: by `save(every=)`, or by
`load(asynchronous=True)` in a script that calls `save` only when one is due.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from graphaccel.checkpoint.saver import saver_of

BAR = 0.10
RUNS, ROUNDS = 5, 4


def measure(width: int, every: int | None) -> dict[str, list[float]]:
    """Seconds that training stands still in one run, by kind of save, in their order.

    every: as for `save`. None: `load` says that saves will be asynchronous.
    """
    folder = tempfile.mkdtemp(prefix="graphaccel_")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters())
    if every is None:
        graphaccel.load(folder, model, optimizer, asynchronous=True)
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    if every is not None:
        graphaccel.save(folder, model, optimizer, step=1, every=every, asynchronous=True)
    seconds: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    time.sleep(3)  # steps of training
    for step in range(10, 10 * (2 * ROUNDS + 1), 10):
        background = step // 10 % 2 == 1
        saved = graphaccel.save(
            folder, model, optimizer, step=step, every=every, keep=1, asynchronous=background
        )
        assert saved is not None
        seconds["asynchronous" if background else "synchronous"].append(round(saved.seconds, 3))
        saver_of(model).wait()
    shutil.rmtree(folder)
    return seconds


def compared(width: int, every: int | None) -> dict[str, Any]:
    """Medians over several runs, of the first asynchronous save and of the later ones, beside that
    of the synchronous ones."""
    runs = [measure(width, every) for _ in range(RUNS)]
    typical = statistics.median(s for run in runs for s in run["synchronous"])
    first = statistics.median(run["asynchronous"][0] for run in runs)
    later = statistics.median(s for run in runs for s in run["asynchronous"][1:])
    return {
        "mib": round(10 * 3 * 4 * (width * width + width) / 2**20),
        "machine": processor(),
        "torch": torch.__version__,
        "seconds": runs,
        "first_over_synchronous": round(first / typical, 3),
        "later_over_synchronous": round(later / typical, 3),
    }


def main() -> int:
    """Print the figures as JSON, and keep them; 1 if a stall is over the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1500)
    width = parser.parse_args().width
    figures = {"load": compared(width, None), "every": compared(width, 10)}
    text = json.dumps(figures, indent=2)
    print(text)
    (RESULTS / "soak_stall.json").write_text(text + "\n")
    names = "first_over_synchronous", "later_over_synchronous"
    return int(max(each[name] for each in figures.values() for name in names) > BAR)


if __name__ == "__main__":
    sys.exit(main())
