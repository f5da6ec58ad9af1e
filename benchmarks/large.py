"""How long planning and rewriting a Llama-3-8B of more and more layers takes, and how much memory.

    python -m benchmarks.large            # a table; writes benchmarks/results/large.json

Hidden size 4096, 8192 tokens, a batch of 64 on 64 H200s, tensor 8 x data 8 x ZeRO 3, on the meta
device. Each number of layers in a process of its own. Seconds by the clock, and of the processor,
which other programs on the machine change less; `load` is how many ran. Planning tells what the
programs of all ranks hold and need without making their nodes; making those of a rank, which it
does when it first runs, is timed apart. `plans_built`: plans that turn out not to fit cost as much.
Twice: with the rest of the plan free, and with microbatches and recomputation pinned, so that all
depths have the same decisions and what an added layer costs is seen by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from graphaccel.planner.plan.plan_name import plan_name

LAYERS = (8, 32, 126)
SAME = {"microbatches": 1, "recompute": "all"}
RESULTS = Path(__file__).parent / "results" / "large.json"


def measured(layers: int, same: bool) -> dict[str, Any]:
    """Seconds of each part, and the peak of memory in GB, in this process."""
    import torch
    import transformers

    from graphaccel.compiler.compiler import Compiler
    from graphaccel.compiler.model import Model, as_batch
    from graphaccel.planner.cluster.catalogue import cluster

    config = transformers.LlamaConfig(
        hidden_size=4096, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.zeros(64, 8192, dtype=torch.long)
    batch = as_batch({"input_ids": ids, "labels": torch.zeros_like(ids)})
    pins = {"tensor": 8, "zero": 3, "data": 8, **(SAME if same else {})}
    compiler = Compiler(Model(model, None, 2.0), cluster("h200-141gb", 64), pins)
    start, cpu = time.perf_counter(), time.process_time()
    step, _ = compiler.capture(batch)
    captured, captured_cpu = time.perf_counter(), time.process_time()
    chosen = compiler.choose(batch)
    plan, program = chosen.plan, chosen.program
    end, end_cpu = time.perf_counter(), time.process_time()
    calls = sum(len(graph.graph.nodes) for stage in program.stages for graph in stage.graphs)
    made, made_cpu = time.perf_counter(), time.process_time()
    return {
        "layers": layers,
        "same": same,
        "ops": step.nodes,
        "plan": plan_name(plan),
        "plans_built": 1 + sum("once built" in note for note in plan.notes),
        "program_nodes": calls,
        "capture_seconds": captured - start,
        "capture_cpu_seconds": captured_cpu - cpu,
        "plan_and_rewrite_seconds": end - captured,
        "plan_and_rewrite_cpu_seconds": end_cpu - captured_cpu,
        "nodes_seconds": made - end,
        "nodes_cpu_seconds": made_cpu - end_cpu,
        "load": os.getloadavg()[0],
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--one", type=int, help="in this process; prints JSON")
    parser.add_argument("--same", action="store_true", help="of --one: decisions pinned")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one, args.same)))
        return
    rows = []
    print(
        f"{'layers':>6} {'ops':>7} {'capture s':>10} {'(cpu)':>7} {'plan s':>7} {'(cpu)':>7} "
        f"{'nodes s':>8} {'built':>5} GB"
    )
    for same, layers in product((False, True), args.layers):
        command = [sys.executable, "-m", "benchmarks.large", "--one", str(layers)]
        command += ["--same"] * same
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        row = json.loads(out.splitlines()[-1])
        rows.append(row)
        print(
            f"{layers:6} {row['ops']:7,} {row['capture_seconds']:10.1f} "
            f"{row['capture_cpu_seconds']:7.1f} {row['plan_and_rewrite_seconds']:7.1f} "
            f"{row['plan_and_rewrite_cpu_seconds']:7.1f} {row['nodes_seconds']:8.1f} "
            f"{row['plans_built']:5} {row['peak_gb']:.2f}{'  same decisions' * same}",
            flush=True,
        )
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
