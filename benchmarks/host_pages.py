"""Steps with freed memory kept by the process, against the C library as it is, on one process.

    python -m benchmarks.host_pages [--rounds 3] [--steps 11]

Each round runs both sides in processes of their own, one after the other. Prints and saves the
median seconds of a step of each and their ratio, for the small models of `benchmarks.predicted` in
1 and in 4 microbatches, and the ratio of the slowest process of a side to its fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from benchmarks import predicted
from benchmarks.shared.common import RESULTS, machine
from graphaccel.cli.measure import measure
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.runtime.host_memory.reuse import KEEP

SIDES = {"kept": "1", "given back": "0"}


def row(name: str, microbatches: int, rounds: int, steps: int) -> dict[str, object]:
    """Both sides of one model."""
    target = Path(predicted.__file__), name
    plan = predicted.planned(target, cluster("cpu", 1), {"microbatches": microbatches}, {})
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, keep in SIDES.items():
            os.environ[KEEP] = keep
            seconds[side].append(measure(target, plan, None, steps).seconds)
    of = {side: statistics.median(each) for side, each in seconds.items()}
    ratio = of["kept"] / of["given back"]
    spread = {side: max(each) / min(each) for side, each in seconds.items()}
    print(f"{name:5} {microbatches} microbatches: {ratio:.3f}", spread, flush=True)
    found = {"model": name, "microbatches": microbatches, "seconds": of}
    return {**found, "ratio": ratio, "slowest_over_fastest_process": spread}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_pages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=11)
    args = parser.parse_args()
    os.environ["GRAPHACCEL_QUIET"] = "1"
    rows = [row(name, m, args.rounds, args.steps) for name in predicted.MODELS for m in (1, 4)]
    body = {
        "name": "host_pages",
        "command": "python -m benchmarks.host_pages",
        "machine": machine(),
    }
    (RESULTS / "host_pages.json").write_text(json.dumps({**body, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
