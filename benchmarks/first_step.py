"""What comes before the first step, in seconds of processor time: capture, plan, and the capture of
a first evaluation, beside one eager training step of the same model.

Each model in a process of its own, as a script has it: nothing is warm but imports. The plan is one
for this machine alone. The proof of the first step is not in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphaccel.runtime.session  # what `optimize` imports, before the clock starts
from benchmarks.shared.common import RESULTS, machine
from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import model_of
from graphaccel.planner.cluster.catalogue import cluster

assert graphaccel.runtime.session

Made = tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]
ROOT = Path(__file__).parents[1]


class Sequence(nn.Module):
    """Two LSTM cells stepped over a sequence, and a linear head: `time_sequence_prediction` of
    pytorch/examples, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(1, 51), nn.LSTMCell(51, 51)
        self.head = nn.Linear(51, 1)

    def forward(self, series: Tensor, target: Tensor) -> Tensor:
        """Mean squared error of the next values: float[b, t] twice -> float[]."""
        h, c, h2, c2 = (torch.zeros(len(series), 51) for _ in range(4))
        outputs = []
        for value in series.split(1, dim=1):
            h, c = self.first(value, (h, c))
            h2, c2 = self.second(h, (h2, c2))
            outputs.append(self.head(h2))
        return nn.functional.mse_loss(torch.cat(outputs, dim=1), target)


def _transformers(layers: int, rows: int, tokens: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens))
    return model, {"input_ids": ids, "labels": ids.clone()}, lambda output: output.loss


def _example(layers: int, rows: int, tokens: int) -> Made:
    spec = importlib.util.spec_from_file_location("model", ROOT / "examples/gpt2/model.py")
    assert spec is not None
    assert spec.loader is not None
    file: Any = importlib.util.module_from_spec(spec)
    sys.modules["model"] = file
    spec.loader.exec_module(file)
    config = file.GPTConfig(layers=layers)
    ids = torch.randint(0, config.vocabulary, (rows, tokens))
    return file.GPT(config), {"idx": ids, "targets": ids.clone()}, lambda output: output[1]


def _series(steps: int) -> Made:
    series = torch.rand(8, steps)
    return Sequence(), {"series": series, "target": series.clone()}, lambda output: output


CASES: dict[str, Callable[[], Made]] = {
    "GPT-2 124M of transformers, 2 x 256 tokens": lambda: _transformers(12, 2, 256),
    "GPT-2 124M of examples/gpt2, 2 x 256 tokens": lambda: _example(12, 2, 256),
    "GPT-2 of 2 layers of transformers, 2 x 256 tokens": lambda: _transformers(2, 2, 256),
    "two LSTM cells over 39 values": lambda: _series(39),
}


def measure(name: str) -> dict[str, Any]:
    """Processor seconds of one model, in this process."""
    torch.manual_seed(0)
    model, batch, loss_of = CASES[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    compiler = Compiler(model_of(model, None, optimizer, "cpu"), cluster("cpu", 1), {})
    call = flatten_call(*as_call(batch))
    clock = [time.process_time()]
    compiler.capture(call)
    clock.append(time.process_time())
    chosen = compiler.choose(call)
    step, plan = chosen.step, chosen.plan
    clock.append(time.process_time())
    model.eval()
    clock.append(time.process_time())
    compiler.captures.of(call, training=False, fixed=plan.model_parallel_size == 1)
    clock.append(time.process_time())
    model.train()
    eager = []
    for _ in range(3):
        start = time.process_time()
        loss_of(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        eager.append(time.process_time() - start)
    capture, planned, evaluation = clock[1] - clock[0], clock[2] - clock[1], clock[4] - clock[3]
    return {
        "nodes": step.nodes,
        "capture_seconds": round(capture, 2),
        "plan_seconds": round(planned, 2),
        "capture_and_plan_seconds": round(capture + planned, 2),
        "evaluation_capture_seconds": round(evaluation, 2),
        "eager_step_seconds": round(min(eager), 3),
        "eager_steps": round((capture + planned) / min(eager), 1),
    }


def _apart(name: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--only", name]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and save all of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("--only", choices=list(CASES), help="one model, in this process; not saved")
    parser.add_argument("--rounds", type=int, default=3, help="the quickest of so many (default 3)")
    given = parser.parse_args(arguments)
    if given.only:
        print(json.dumps(measure(given.only)))
        return
    rows = {}
    for name in CASES:
        rounds = [_apart(name) for _ in range(given.rounds)]
        rows[name] = min(rounds, key=lambda row: row["capture_and_plan_seconds"])
        print(f"{name:52}", *(f"{key} {value}" for key, value in rows[name].items()))
    found = {
        "name": "first_step",
        "command": "python -m benchmarks.first_step",
        "load": [round(n, 1) for n in os.getloadavg()],
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "models": rows,
    }
    (RESULTS / "first_step.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
