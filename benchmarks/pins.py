"""The plan that is chosen for ten known models, and against plans that are pinned at random.

    python -m benchmarks.pins [JOB ...] [--pins N]      # writes benchmarks/results/pins.json

A job is a model on a number of GPUs, planned from its Hugging Face class on the meta device in bf16
with AdamW, in a process of its own. The row of a job has the plan, its seconds, the gap that its
certificate admits, the processor seconds (user and system) from the start of the process to the
printed report, the most memory of the process until then, and the lines of the report.

Pins are drawn with a fixed seed: one to four of the axes, the level of ZeRO, microbatches and
recomputation, each solved by the same search; those that contradict each other or do not fit are
not counted. Of each the best has no offload, as a plan that is chosen with it must be worth its
copies. bound: the least that the lower bound of a plan that was solved leaves of its seconds, which
is at most 1. `--pins 0` plans alone, and keeps what earlier runs drew.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.search import CASES, Case, model_of
from benchmarks.shared.common import RESULTS
from graphaccel.planner.plan.plan_name import plan_name

RESULT = RESULTS / "pins.json"
JOBS: dict[str, Case | dict[str, Any]] = {
    "405b-1024": CASES["405b-1024"],
    "405b-16384": CASES["405b-16384"],
    "70b-64": CASES["70b-64"],
    "8b-8": CASES["8b-8"],
    "gpt3-1024": CASES["gpt3-175b-1024"],
    "mixtral-64": CASES["mixtral-64"],
    "qwen3-30b-64": {
        "devices": 64, "batch": 4096, "tokens": 4096, "class": "Qwen3Moe", "config": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 4096,
        },
    },
    "deepseek-v3-2048": {
        "devices": 2048, "batch": 15360, "tokens": 4096, "class": "DeepseekV3", "config": {},
    },
    "t5-11b-64": Case("t5-11b", 64, 2048, 512, 24, answer=128),
    "vit-g-8": Case("vit-g", 8, 1024, 256, 40),
}  # fmt: skip
"""The jobs: a case of `benchmarks.search`, or a Hugging Face class with its configuration."""

_RECOMPUTES = ("none", "some", "all")


def drawn(random: Random, devices: int) -> dict[str, Any]:
    """Pins of one plan."""
    powers = [2**n for n in range(devices.bit_length()) if devices % 2**n == 0]
    choices: dict[str, list[Any]] = {
        "tensor": [n for n in powers if n <= 8],
        "context": [n for n in powers if n <= 4],
        "expert": [n for n in powers if n <= 64],
        "pipeline": [n for n in powers if n <= 32],
        "zero": [0, 1, 2, 3],
        "microbatches": [2**n for n in range(8)],
        "recompute": list(_RECOMPUTES),
    }
    names = random.sample(list(choices), random.randint(1, 4))
    return {name: random.choice(choices[name]) for name in names}


def _job(name: str) -> tuple[Any, Any, str, int]:
    """(module, batch, device, number of devices) of a job."""
    job = JOBS[name]
    if isinstance(job, Case):
        return *model_of(job), job.device, job.devices
    import torch
    import transformers as hf

    from graphaccel.compiler.model import as_batch

    config = getattr(hf, f"{job['class']}Config")(**job["config"], use_cache=False)
    with torch.device("meta"):
        module = getattr(hf, f"{job['class']}ForCausalLM")(config)
        ids = torch.empty(job["batch"], job["tokens"], dtype=torch.int64)
    batch = as_batch({"input_ids": ids, "labels": torch.empty_like(ids)})
    return module.train(), batch, "h100-80gb", job["devices"]


def measured(name: str, count: int) -> dict[str, Any]:
    """One job in this process."""
    from graphaccel.compiler.compiler import Compiler
    from graphaccel.compiler.model import Model
    from graphaccel.planner.cluster.catalogue import cluster
    from graphaccel.planner.search.record import Record
    from graphaccel.report.brief import brief_text
    from graphaccel.report.facts import gather

    record = Record()
    module, batch, device, devices = _job(name)
    where = cluster(device, devices)
    compiler = Compiler(Model(module, None, 2.0), where, {"precision": "bf16"})
    planned = compiler.choose(batch, record)
    plan, problem = planned.plan, record.problem
    assert problem is not None
    assert plan.prediction is not None
    report = brief_text(
        gather(
            plan, problem.profile.step, where, model_name=name, assumed="AdamW",
            layouts=problem.layouts, program=planned.program,
        )
    )  # fmt: skip
    found = re.search(r"gap (?:at most )?([0-9.]+)", plan.certificate)
    row = {
        "device": device, "devices": devices, "batch": plan.batch,
        "plan": plan_name(plan), "seconds": plan.prediction.seconds,
        "certificate": plan.certificate, "gap_percent": float(found[1]) if found else None,
        "processor_seconds": time.process_time(),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "report_lines": report.count("\n"),
    }  # fmt: skip
    return row | (_against_pins(name, count, compiler, batch, record, plan) if count else {})


def _against_pins(
    name: str, count: int, compiler: Any, batch: Any, record: Any, chosen: Any
) -> dict[str, Any]:
    """The best of plans that are pinned at random, and how near their bounds come to them."""
    from graphaccel.errors import GraphAccelError
    from graphaccel.planner.plan.conflicts import agreeing_pins
    from graphaccel.planner.search.branch_and_bound import solve_all

    problem, random = record.problem, Random(name)
    best: tuple[float, str, dict[str, Any]] | None = None
    feasible, nearest = 0, 0.0
    for _ in range(count):
        pins = drawn(random, problem.cluster.count)
        asked = {"precision": "bf16", **pins}
        try:
            decided = agreeing_pins(
                asked, problem.profile.step, problem.cluster.count, record.batch, problem.limits
            )
            fitting = solve_all(problem, decided, record.batch).fitting
            if not fitting:
                continue
            nearest = max(nearest, _bound(problem, fitting))
            found = fitting[0]
            if found.prediction.seconds < chosen.prediction.seconds:  # as it is once built
                found = compiler.with_pins(asked).choose(batch).plan
        except GraphAccelError:  # pins that contradict each other, or that no plan can keep
            continue
        feasible += 1
        if best is None or found.prediction.seconds < best[0]:
            best = found.prediction.seconds, plan_name(found), pins
    return {
        "drawn": count, "feasible": feasible, "bound": nearest,
        "best_pinned_seconds": best[0] if best else None,
        "best_pinned": best[1] if best else "", "pins": best[2] if best else {},
    }  # fmt: skip


def _bound(problem: Any, plans: Sequence[Any]) -> float:
    """The largest part of a plan's seconds that the lower bound of its mesh is; at most 1, if it is
    one."""
    from graphaccel.planner.search.bounds import Bounds
    from graphaccel.planner.search.candidate_columns import columns
    from graphaccel.planner.search.neighbours import shape_of

    result, bounds = 0.0, Bounds(problem, plans[0])
    for plan in plans:
        of = columns([shape_of(plan)], plan.batch)
        result = max(result, float(bounds.seconds(of)[0]) / plan.prediction.seconds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--pins", type=int, default=200, metavar="N", help="plans that are drawn")
    parser.add_argument("--one", help="in this process; prints JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.one, args.pins)))
        return
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in args.jobs or JOBS:
        command = [sys.executable, "-m", "benchmarks.pins", "--one", name, "--pins", str(args.pins)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = rows[name] = rows.get(name, {}) | json.loads(out.splitlines()[-1])
        rows = {key: rows[key] for key in JOBS if key in rows}
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")
        pinned = ""
        if args.pins:
            pinned = f"; of {row['feasible']} pinned the best {row['best_pinned_seconds'] or 0:.4g}"
            pinned += f" s: {row['best_pinned']}; bound {row['bound']:.2f}"
        print(
            f"{name:18} {row['seconds']:.4g} s: {row['plan']}; gap {row['gap_percent']} %; "
            f"{row['processor_seconds']:.0f} processor seconds, {row['peak_gb']:.1f} GB, "
            f"{row['report_lines']} lines{pinned}",
            flush=True,
        )


if __name__ == "__main__":
    main()
