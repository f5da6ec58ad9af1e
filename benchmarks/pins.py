"""The plan that is chosen for known models, against plans that are pinned at random.

    python -m benchmarks.pins [JOB ...] [--pins N]      # writes benchmarks/results/pins.json

A job is a model on a number of GPUs, planned from its Hugging Face class on the meta device in bf16
with AdamW, in a process of its own. Pins are drawn with a fixed seed: one to four of the axes, the
level of ZeRO, microbatches and recomputation, each solved by the same search; those that contradict
each other or do not fit are not counted. The row of a job has the seconds of both, the processor
seconds from the file to the chosen plan, and the most memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from random import Random
from typing import Any

from benchmarks.shared.common import RESULTS
from graphaccel.planner.plan.plan_name import plan_name

RESULT = RESULTS / "pins.json"
JOBS: dict[str, dict[str, Any]] = {
    "405b-1024": {"case": "405b-1024"},
    "405b-16384": {"case": "405b-16384"},
    "70b-64": {"case": "70b-64"},
    "8b-8": {"case": "8b-8"},
    "gpt3-1024": {"case": "gpt3-175b-1024"},
    "mixtral-64": {"case": "mixtral-64"},
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
    "t5-11b-160": {"case": "t5-11b-160"},
    "vit-g-32": {"case": "vit-g-32"},
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
    if "case" in job:
        from benchmarks.search import CASES, model_of

        case = CASES[job["case"]]
        return *model_of(case), case.device, case.devices
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
    from graphaccel.errors import GraphAccelError
    from graphaccel.planner.cluster.catalogue import cluster
    from graphaccel.planner.plan.conflicts import agreeing_pins
    from graphaccel.planner.search.branch_and_bound import solve_all
    from graphaccel.planner.search.record import Record

    begin, record = time.process_time(), Record()
    module, batch, device, devices = _job(name)
    compiler = Compiler(Model(module, None, 2.0), cluster(device, devices), {"precision": "bf16"})
    planned = compiler.choose(batch, record)
    step, plan = planned.step, planned.plan
    took, random = time.process_time() - begin, Random(name)
    problem = record.problem
    assert problem is not None
    assert plan.prediction is not None
    best: tuple[float, str, dict[str, Any]] | None = None
    feasible = 0
    for _ in range(count):
        pins = drawn(random, devices)
        asked = {"precision": "bf16", **pins}
        try:
            decided = agreeing_pins(asked, step, devices, record.batch, problem.limits)
            fitting = solve_all(problem, decided, record.batch).fitting
        except GraphAccelError:  # pins that contradict each other, or that no plan can keep
            continue
        feasible += bool(fitting)
        for found in fitting[:1]:
            assert found.prediction is not None
            if best is None or found.prediction.seconds < best[0]:
                best = found.prediction.seconds, plan_name(found), pins
    return {
        "plan": plan_name(plan), "seconds": plan.prediction.seconds,
        "certificate": plan.certificate,
        "drawn": count, "feasible": feasible,
        "best_pinned_seconds": best[0] if best else None,
        "best_pinned": best[1] if best else "", "pins": best[2] if best else {},
        "processor_seconds": took,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }  # fmt: skip


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
        row = rows[name] = json.loads(out.splitlines()[-1])
        rows = {key: rows[key] for key in JOBS if key in rows}
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")
        print(
            f"{name:18} {row['seconds']:.4g} s: {row['plan']}; of {row['feasible']} pinned the "
            f"best {row['best_pinned_seconds'] or 0:.4g} s: {row['best_pinned']}; "
            f"{row['processor_seconds']:.0f} processor seconds, {row['peak_gb']:.1f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
