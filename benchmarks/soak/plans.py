"""A checkpoint saved under each of eight plans, loaded under each: bit by bit the same?

    python -m benchmarks.soak.plans

Four processes train a small GPT a few steps under a plan and save; every plan then loads all eight
checkpoints. Weights and optimizer state of every rank are compared with the saved ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from tests.gloo.run.test_checkpoint_layouts import full_state
from tests.gloo.scripts.test_semantics import gpt, groups, tokens
from tests.support.pool import Pool

PLANS: dict[str, dict[str, Any]] = {
    "data 4": {"data": 4, "zero": 0},
    "zero 1": {"data": 4, "zero": 1},
    "zero 2": {"data": 4, "zero": 2},
    "zero 3": {"data": 4, "zero": 3},
    "pipeline 4": {"pipeline": 4, "microbatches": 4},
    "tensor 4": {"tensor": 4},
    "pipeline 2, zero 3": {"data": 2, "zero": 3, "pipeline": 2, "microbatches": 2},
    "tensor 2, zero 3": {"data": 2, "zero": 3, "tensor": 2},
}

LIMIT_S = 1800.0

Trained = tuple[nn.Module, torch.optim.Optimizer]


def _planned(pins: dict[str, Any]) -> Trained:
    model = gpt(4)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    wanted = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
    if wanted["pipeline"] > 1:
        wanted["interleave"] = 1
    graphaccel.optimize(model, optimizer, devices=4, check="off", example_batch=tokens(), **wanted)
    return model, optimizer


def _pairs(folder: str) -> list[tuple[str, str, int, int]]:
    """(saved under, loaded under, tensors compared, tensors that differ) of this rank."""
    runs: dict[str, Trained] = {}
    saved: dict[str, dict[str, Tensor]] = {}
    for number, (name, pins) in enumerate(PLANS.items()):
        model, optimizer = runs[name] = _planned(pins)
        for step in range(3):
            model(**tokens(seed=10 * number + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        graphaccel.save(f"{folder}/{number}", model, optimizer, step=3)
        saved[name] = full_state(model, optimizer)
    results = []
    for number, source in enumerate(PLANS):
        for target, (model, optimizer) in runs.items():
            assert graphaccel.load(f"{folder}/{number}", model, optimizer).step == 3
            loaded = full_state(model, optimizer)
            both = [key for key in loaded if key in saved[source]]
            differ = [key for key in both if not torch.equal(loaded[key], saved[source][key])]
            results.append((source, target, len(both), len(differ)))
    return results


def main() -> int:
    """Print the figures as JSON, and keep them; 1 if a tensor differs."""
    pool = Pool(timeout_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        ranks = pool.run(4, _pairs, folder)
    pool.close()
    rows = [row for rank in ranks for row in rank]
    figures = {
        "machine": processor(),
        "torch": torch.__version__,
        "plans": list(PLANS),
        "ways": len({row[:2] for row in rows}),
        "tensors_compared": sum(row[2] for row in rows),
        "fewest_tensors_of_a_rank_and_way": min(row[2] for row in rows),
        "tensors_that_differ_in_a_bit": sum(row[3] for row in rows),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    Path(RESULTS / "soak_plans.json").write_text(text + "\n")
    return int(figures["tensors_that_differ_in_a_bit"] > 0)


if __name__ == "__main__":
    sys.exit(main())
