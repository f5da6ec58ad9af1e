"""`compiler.program_memory`: the memory of many microbatches is counted on few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.program_memory import ProgramMemory
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.estimate.stage_costs import repeating
from graphaccel.planner.memory.exact_memory import rank_memory
from tests.support.gpt import GPT

BATCH = 46  # microbatches of 1: more than repeat for 2 and 4 ranks


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    model: nn.Module = GPT(layers=4, width=8, heads=2, context=4, vocabulary=16)
    return Compiler(Model(model, None, 2.0), cluster("cpu", 2), {"microbatches": BATCH})


@pytest.mark.parametrize(
    "pins",
    [
        {"pipeline": 2, "schedule": "1f1b"},
        {"pipeline": 2, "schedule": "zero_bubble"},
        {"pipeline": 2, "interleave": 2},
        {"pipeline": 2, "schedule": "1f1b", "recompute": "all"},
        {"pipeline": 2, "schedule": "1f1b", "offload": "optimizer+activations"},
        {"data": 2, "zero": 3, "microbatches": BATCH // 2},
        {"pipeline": 2, "schedule": "gpipe"},
        {"pipeline": 2, "outputs": "all"},
    ],
    ids=lambda pins: " ".join(f"{k}={v}" for k, v in pins.items()),
)
def test_the_peak_of_all_microbatches(compiler: Compiler, pins: dict[str, Any]) -> None:
    ids = torch.zeros(BATCH, 4, dtype=torch.int64)
    batch = as_batch((ids, ids))
    chosen = compiler.with_pins({**compiler.pins, **pins}).choose(batch)
    memory = ProgramMemory(compiler.model, compiler.cluster, batch, chosen.plan, chosen.program)
    for rank, counted in enumerate(memory.of_ranks(())):
        whole = rank_memory(chosen.program, memory.schedule, rank, memory.resident[rank])
        same = replace(counted, peak=counted.peak - counted.other, other=0, at=whole.at)
        assert same == whole
    few = repeating(chosen.plan.pipeline, chosen.plan.microbatches)
    assert few < chosen.plan.microbatches, "nothing would be left out"
