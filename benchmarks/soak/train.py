"""A script for `graphaccel run`: resumes, trains until it is stopped, and saves every few steps.

    graphaccel run --devices 4 --checkpoint FOLDER benchmarks/soak/train.py --every 5

Each rank prints when it begins to write its part of a checkpoint; rank 0 the step that it resumed
from, every loss in hexadecimal, and each completed save.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).parents[2]))

import graphaccel
from benchmarks.soak.network import PLANS, batch, build

RANK = int(os.environ.get("RANK", "0"))


def say(*words: object) -> None:
    """Write one line at once, so that those of several ranks do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def slow_writers(seconds: float) -> None:
    """Make every write of tensors take longer: half of it before, half after the files exist."""
    write = FileSystemWriter.write_data

    def slowed(self: Any, *arguments: Any) -> Any:
        say("saving", RANK)
        time.sleep(seconds / 2)
        result = write(self, *arguments)
        time.sleep(seconds / 2)
        return result

    FileSystemWriter.write_data = slowed  # type: ignore[method-assign]


def main() -> None:
    """Train from the newest complete checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    asked = parser.parse_args()
    model, optimizer = build(asked.dropout)
    pins = PLANS[int(os.environ["WORLD_SIZE"])]
    graphaccel.optimize(model, optimizer, loss_fn=mse_loss, example_batch=batch(0), **pins)
    start = graphaccel.load(None, model, optimizer).step
    slow_writers(asked.slow)
    if RANK == 0:
        say("resumed", start)
    for step in range(start + 1, asked.steps + 1):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            say("loss", step, loss.item().hex())
        saved = graphaccel.save(None, model, optimizer, step=step, every=asked.every)
        if saved is not None and RANK == 0:
            say("saved", step)


if __name__ == "__main__":
    main()
