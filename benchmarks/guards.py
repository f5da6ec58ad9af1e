"""The cost of what is done beside each training step: GPT-2 small of transformers, one process.

Python state is compared before each step (`places`); with several ranks weights are compared, too,
64 times a whole turn; `graphaccel train --metrics` writes a line at each log, here after each step.
Each is timed by itself, many times, beside the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from graphaccel.capture.batch import flatten_call
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.runtime.copies import EVERY, Copies
from graphaccel.runtime.mesh import Mesh
from graphaccel.training.metrics import Metrics, MetricsFile

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
    assert guards.hold()
    copies = Copies(model.parameters(), Mesh(0, dict.fromkeys(AXES, 1)))
    copies.numbers()  # the first looks where weights are
    check, whole = _median(guards.hold, CHECKS), statistics.median(steps[1:])
    weights = statistics.mean(_seconds(copies.numbers) for _ in range(EVERY))
    line = _metrics(model, rows, tokens)
    return {
        "model": f"GPT-2, {layers} layers, {rows} x {tokens} tokens, AdamW",
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "places": len(guards.recorded),
        "check_microseconds": round(1e6 * check, 1),
        "step_milliseconds": round(1e3 * whole, 1),
        "percent": round(100 * check / whole, 4),
        "weights_milliseconds": round(1e3 * weights, 2),
        "weights_percent": round(100 * weights / whole, 4),
        "metrics_microseconds": round(1e6 * line, 1),
        "metrics_percent": round(100 * line / whole, 4),
    }


def _metrics(model: Any, rows: int, tokens: int) -> float:
    """Seconds of a line of metrics, with what is measured for it."""
    state = SimpleNamespace(is_world_process_zero=True, global_step=1)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics(
            [MetricsFile(Path(folder) / "metrics.jsonl", resumes=False)], rows, tokens
        )
        metrics.on_train_begin(None, state, None)

        def step() -> None:
            metrics.on_step_begin(None, state, None)
            metrics.on_step_end(None, state, None)
            metrics.on_log(None, state, None, logs={"loss": 1.0}, model=model)

        return _median(step, CHECKS)


def _median(act: Callable[[], Any], times: int) -> float:
    return statistics.median(_seconds(act) for _ in range(times))


def _seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


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
