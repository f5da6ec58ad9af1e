"""This machine calibrated, then plans predicted and run: how far apart the two are.

    python -m benchmarks.predicted [--models gpt,bert,vit] [--steps 9] [--rounds 3] [--threads 1]

A process stands for a device, and all have as many threads: one, so that four processes are four
devices of one kind, and a step does not depend on which cores the machine gives two threads.
For each model and number of processes `graphaccel calibrate` measures the ops and the messages;
then each plan is predicted from that alone and run, all of them in turn in each round, so that what
else the machine does slows them alike; those within a tenth of the fastest in as many rounds again.
The median of the rounds counts. Prints and saves predicted
and measured seconds of a step, the mean error, whether predictions order the plans of a model, and
those of all, as the runs do (Spearman's rank correlation), and what the plan that `optimize()`
takes by itself loses to the best of those that were run with the same number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from benchmarks.shared.common import RESULTS, Settings, machine, make_batch, make_model
from benchmarks.validation.grids import spearman
from graphaccel.cli.calibration import measured
from graphaccel.cli.jobs import find_job
from graphaccel.cli.measure import measure
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, optimizer_bytes
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.cluster.cluster import Cluster
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.plan_name import plan_name

PLANS: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (1, {"microbatches": 1}),
    (1, {"microbatches": 4, "recompute": "all"}),
    (2, {"data": 2, "zero": 0}),
    (2, {"pipeline": 2, "schedule": "1f1b", "microbatches": 4}),
    (2, {"pipeline": 2, "schedule": "zero_bubble", "microbatches": 4}),
    (4, {"data": 2, "pipeline": 2, "schedule": "1f1b", "microbatches": 4, "zero": 0}),
)
BATCH, TOKENS = 8, 128
_NEAR = 1.1  # times the fastest: such plans are run more often, to be told apart


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def gpt() -> tuple[Any, ...]:
    """Six blocks of width 256 and a tied head."""
    model = make_model(Settings())
    return model, make_batch(Settings()), None, _adamw(model)


def bert() -> tuple[Any, ...]:
    """Hugging Face's encoder, classification."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(4096, (BATCH, TOKENS)), "labels": torch.arange(BATCH) % 2}
    model = transformers.BertForSequenceClassification(config)
    return model, batch, None, _adamw(model)


def vit() -> tuple[Any, ...]:
    """Hugging Face's vision transformer on images of 64 x 64."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        image_size=64, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    images = torch.randn(BATCH, 3, 64, 64)
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.arange(BATCH) % 2}, None, _adamw(model)


MODELS = MappingProxyType({"gpt": gpt, "bert": bert, "vit": vit})


def planned(
    target: tuple[Path, str], where: Cluster, pins: Mapping[str, Any], captures: dict[Any, Any]
) -> Plan:
    """The plan with these pins; none: the one that `optimize()` takes. captures: of the model, for
    all its plans."""
    job = find_job(*target)
    model = Model(job.model, job.loss_fn, optimizer_bytes(job.optimizer))
    compiler = Compiler(model, where, {**job.pins, **pins})
    compiler.captures.steps = captures
    return compiler.choose(job.batch).plan


def rounds_of(
    target: tuple[Path, str | None], plans: Sequence[Plan], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step in each round, by name: a plan that is chosen and pinned runs once."""
    each = {plan_name(plan): plan for plan in plans}
    found: dict[str, list[float]] = {name: [] for name in each}

    def run(names: Sequence[str]) -> None:
        for _ in range(rounds):
            for name in names:
                found[name].append(measure(target, each[name], None, steps).seconds)

    run([*each])
    took = {name: statistics.median(seconds) for name, seconds in found.items()}
    near = [name for name in each if took[name] <= _NEAR * min(took.values())]
    if len(near) > 1:
        run(near)
    return found


def pairs(name: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each plan of a model; those without pins are its own."""
    target = Path(__file__), name
    rows: list[dict[str, Any]] = []
    captures: dict[Any, Any] = {}
    for count in sorted({count for count, _ in PLANS}):
        where = measured(cluster("cpu", count), target)
        every = [pins for n, pins in PLANS if n == count]
        every += [{}] if count > 1 else []
        plans = [planned(target, where, pins, captures) for pins in every]
        found = rounds_of(target, plans, steps, rounds)
        for pins, plan in zip(every, plans, strict=True):
            assert plan.prediction is not None
            seconds = found[plan_name(plan)]
            took = statistics.median(seconds)
            row = {"model": name, "processes": count, "pins": dict(pins), "plan": plan_name(plan)}
            row |= {"predicted": plan.prediction.seconds, "measured": took, "rounds": seconds}
            said = f"{1e3 * row['predicted']:8.1f} ms {1e3 * took:8.1f} ms"
            error = row["predicted"] / took - 1
            print(f"{name:6} {count} {plan_name(plan):60} {said} {error:+.1%}", flush=True)
            rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean error, rank correlation of pinned plans, of each model and of all, and what own choices
    lose."""
    pinned = [r for r in rows if r["pins"]]
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in pinned]
    order = {}
    for name in dict.fromkeys(r["model"] for r in pinned):
        mine = [r for r in pinned if r["model"] == name]
        order[name] = spearman([r["predicted"] for r in mine], [r["measured"] for r in mine])
    order["all"] = spearman([r["predicted"] for r in pinned], [r["measured"] for r in pinned])
    lost = {}
    for own in (r for r in rows if not r["pins"]):
        here = [r for r in rows if all(r[k] == own[k] for k in ("model", "processes"))]
        best = min(r["measured"] for r in here if r["pins"])
        lost[f"{own['model']} {own['processes']}"] = own["measured"] / best - 1
    return {"mean_error": sum(errors) / len(errors), "spearman": order, "own_choice_loses": lost}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    args = parser.parse_args()
    os.environ.update(GRAPHACCEL_QUIET="1", OMP_NUM_THREADS=str(args.threads))
    rows = [row for name in args.models.split(",") for row in pairs(name, args.steps, args.rounds)]
    found = summary(rows)
    print(json.dumps(found, indent=1))
    body = {
        "name": "predicted",
        "command": "python -m benchmarks.predicted",
        "machine": {**machine(), "threads": args.threads},
    }
    (RESULTS / "predicted.json").write_text(
        json.dumps({**body, **found, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
