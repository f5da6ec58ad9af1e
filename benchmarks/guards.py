"""What comparing Python state before each step costs: GPT-2 small of transformers, one process.

The check is timed by itself, many times, beside the step it stands before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import graphaccel
from benchmarks.shared.common import RESULTS
from graphaccel.capture.batch import flatten_call

STEPS = 5
CHECKS = 2000


def measure(layers: int, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds of a training step and of a check, and how many places a check compares."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, devices=1)
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens))
    steps = []
    for _ in range(STEPS + 1):
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - start)
    captures = model.graphaccel.compiler.captures
    (step,) = captures.steps.values()
    guards = captures.guards(step, flatten_call((), {}))
    checks = []
    for _ in range(CHECKS):
        start = time.perf_counter()
        assert guards.hold()
        checks.append(time.perf_counter() - start)
    check, whole = statistics.median(checks), statistics.median(steps[1:])
    return {
        "model": f"GPT-2, {layers} layers, {rows} x {tokens} tokens, AdamW",
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "places": len(guards.recorded),
        "check_microseconds": round(1e6 * check, 1),
        "step_milliseconds": round(1e3 * whole, 1),
        "percent": round(100 * check / whole, 4),
    }


def processor() -> str:
    """The name of this machine's processor, as Linux says it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    torch.manual_seed(0)
    found = measure(given.layers, given.rows, given.tokens)
    print(json.dumps(found, indent=2))
    Path(RESULTS / "guards.json").write_text(json.dumps(found, indent=2) + "\n")
