"""One process: a step of GPT-2 and of BERT in eager mode, as FX code and by Inductor.

    python -m benchmarks.compile

Sides: eager; `torch.compile` of the model; graphaccel without (FX code) and with
`compile="inductor"`, each with and without `fusions="auto"`. The optimizer's step is in all of
them. Compile seconds are those of the first step, with an empty cache; peak bytes are what the
allocator had at once in one step, parameters and optimizer state not counted. Saves
benchmarks/results/compile.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.shared.common import RESULTS, RUN_LIMIT_S, Settings, Step, machine, time_sides
from benchmarks.shared.transformer import bert, eager, gpt2, ours
from tests.support.pool import Pool

MODELS = {"gpt2": gpt2, "bert": bert}


def sides(make: Callable[[Settings], Any], settings: Settings) -> dict[str, Callable[[], Step]]:
    """What is timed, by name."""
    return {
        "eager": partial(eager, make, settings),
        "torch.compile": partial(eager, make, settings, compiled=True),
        "graphaccel, FX": partial(ours, make, settings, fusions="off"),
        "graphaccel, Inductor": partial(ours, make, settings, fusions="off", compile="inductor"),
        "graphaccel, FX, fusions": partial(ours, make, settings),
        "graphaccel, Inductor, fusions": partial(ours, make, settings, compile="inductor"),
    }


def _peak(step: Step) -> int:
    """Bytes that the allocator had at once in a step, beyond those at its start."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def worker(name: str, settings: Settings, cache: str) -> dict[str, Any]:
    """All sides of one model; what was predicted of graphaccel's peak."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    found: dict[str, Any] = {}
    made: dict[str, Step] = {}
    torch.set_num_threads(settings.threads)
    for side, maker in sides(MODELS[name], settings).items():
        step = maker()
        start = time.perf_counter()
        step()
        found[side] = {"first_step_seconds": time.perf_counter() - start}
        made[side] = step
    timed = time_sides(settings, {side: (lambda s=step: s) for side, step in made.items()})
    for side, row in timed.items():
        found[side] |= row | {"median_seconds": statistics.median(row["seconds"])}
        found[side]["peak_bytes"] = _peak(made[side])
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), help="this one; the other rows are kept")
    chosen = parser.parse_args().model
    settings = Settings(rounds=5, steps=2)
    path = RESULTS / "compile.json"
    rows: dict[str, Any] = {}
    if chosen is not None and path.exists():
        rows = json.loads(path.read_text())["rows"]
    for name in MODELS if chosen is None else (chosen,):
        pool = Pool(timeout_s=RUN_LIMIT_S)
        with tempfile.TemporaryDirectory() as cache:
            try:
                rows[name] = pool.run(1, worker, name, settings, cache)[0]
            finally:
                pool.close()
        eager_seconds = rows[name]["eager"]["median_seconds"]
        for side, row in rows[name].items():
            print(
                f"{name:5} {side:30} {1e3 * row['median_seconds']:8.1f} ms "
                f"{row['median_seconds'] / eager_seconds:6.3f} of eager, first step "
                f"{row['first_step_seconds']:6.1f} s, {row['peak_bytes'] / 1e6:7.1f} MB"
            )
    rows = {name: rows[name] for name in MODELS if name in rows}
    result = {
        "name": "compile", "command": "python -m benchmarks.compile", "rows": rows,
        "settings": asdict(settings),
        "machine": machine(),
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
