"""What the proof of the first step costs, in seconds of processor time, beside eager training steps
on the same rows.

The batch is as small as the slice that is compared (2 rows), where the proof is dearest. A step is
forward, backward, AdamW and zero_grad. Measured are the comparison of the captured graph with
eager code, and with it what the plan's step is compared with; the plan's step is a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.first_step import CASES as MODELS
from benchmarks.shared.common import RESULTS, machine
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import model_of
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.proof.comparison import pair_of
from graphaccel.proof.first_step import prove
from graphaccel.proof.planned import Expected, expect

CASES = (
    "GPT-2 124M of transformers, 2 x 256 tokens",
    "GPT-2 124M of examples/gpt2, 2 x 256 tokens",
)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Processor seconds of one model: medians of rounds that alternate."""
    torch.manual_seed(0)
    model, batch, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    compiler = Compiler(model_of(model, None, optimizer, "cpu"), cluster("cpu", 1), {})
    call = flatten_call(*as_call(batch))
    step, sizes = compiler.capture(call)
    chosen = compiler.choose(call)
    plan, program = chosen.plan, chosen.program
    pair = pair_of(model, None, step, call, sizes)
    seconds: dict[str, list[float]] = {"eager_step": [], "proof": [], "expected": []}
    for _ in range(rounds + 1):
        with _clocked(seconds["eager_step"]):
            loss_of(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with _clocked(seconds["proof"]):
            made = prove(pair)
        assert made.proved, made.text
        with _clocked(seconds["expected"]):
            wanted = expect(pair, plan, program, 1, example=False, known=made.graph)
        assert isinstance(wanted, Expected)
    found = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    total = found["proof"] + found["expected"]
    return {
        **{f"{key}_seconds": round(value, 3) for key, value in found.items()},
        "eager_steps": round(total / found["eager_step"], 2),
        "text": made.text,
    }


@contextmanager
def _clocked(values: list[float]) -> Iterator[None]:
    """Append the processor seconds of a block."""
    start = time.process_time()
    yield
    values.append(time.process_time() - start)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and save all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how many rounds (default 5)")
    given = parser.parse_args(arguments)
    rows = {}
    for name in CASES:
        rows[name] = measure(name, given.rounds)
        print(f"{name:52}", *(f"{key} {value}" for key, value in rows[name].items()))
    found = {
        "name": "proof",
        "command": "python -m benchmarks.proof",
        "load": [round(n, 1) for n in os.getloadavg()],
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rounds": given.rounds,
        "models": rows,
    }
    (RESULTS / "proof.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
