"""What batches of many lengths cost: a small GPT-2 of transformers, padded batches, 30 lengths.

Epochs of eager code and of the planned model follow each other in one run; processor seconds of
rank 0 are compared, after the first epoch, in which programs are made.

    python -m benchmarks.lengths --devices 2
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from typing import Any

import torch
from torch import Tensor

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from graphaccel.planner.plan.plan_name import plan_name

LENGTHS = range(8, 128, 4)
ROWS, EPOCHS = 8, 3


def batches() -> list[dict[str, Tensor]]:
    """Two of each length, shuffled, padded as a collator does it."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for place in torch.randperm(2 * len(LENGTHS), generator=generator).tolist():
        length = LENGTHS[place % len(LENGTHS)]
        ids = torch.randint(0, 512, (ROWS, length), generator=generator)
        ends = torch.randint(length // 2, length + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(length) < ends).long()
        labels = ids.masked_fill(mask == 0, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def epoch(model: Any, optimizer: torch.optim.Optimizer, data: list[dict[str, Tensor]]) -> float:
    """Processor seconds."""
    start = time.process_time()
    for batch in data:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


def measure(devices: int) -> dict[str, Any]:
    """Captures, programs, and processor seconds of each epoch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
    plain: Any = GPT2LMHeadModel(GPT2Config(**size, use_cache=False))
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=devices)
    data = batches()
    seconds: dict[str, list[float]] = {"eager": [], "graphaccel": []}
    for _ in range(EPOCHS):
        for name, model, optimizer in zip(seconds, (plain, ours), optimizers, strict=True):
            seconds[name].append(round(epoch(model, optimizer, data), 2))
    later = [sum(values[1:]) for values in seconds.values()]
    return {
        "model": f"GPT-2, 2 layers of 128, {len(data)} batches of {len(LENGTHS)} lengths",
        "devices": devices,
        "plan": plan_name(ours.graphaccel.plan),
        "machine": {"cores": os.cpu_count(), "processor": processor()},
        "torch": torch.__version__,
        "captures": len(ours.graphaccel.compiler.captures.steps),
        "processor_seconds_an_epoch": seconds,
        "later_epochs_over_eager": round(later[1] / later[0], 2),
    }


def main() -> None:
    """Print the figures as JSON, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    devices = parser.parse_args().devices
    text = json.dumps(measure(devices), indent=2)
    if os.environ.get("RANK", "0") == "0":
        print(text)
        (RESULTS / f"lengths_{devices}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
