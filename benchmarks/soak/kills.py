"""kill -9 of one rank of four, at random moments, some inside a save: what is left of a run.

    python -m benchmarks.soak.kills

hand: a run is killed and started again by hand. restarts: runs restart by themselves, each killed
three times. devices: a run goes on with four, two and four devices. Each is compared with a run
that nothing disturbed; figures of parts that are not run again stay in the JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import graphaccel
from benchmarks.shared.common import RESULTS, processor
from benchmarks.soak.life import Life
from benchmarks.soak.network import build

DEVICES = 4
SLOW_S = 1.0
"""Added to every write of tensors."""
BAR_S = 30.0
SLOW = ("--slow", str(SLOW_S))
RESTARTS = 3
"""Of one job, `--max-restarts`."""
PARTS = ("hand", "restarts", "devices")
NEAR = 1e-6


@dataclass(frozen=True)
class Killed:
    """One kill. moment: "start", "training" or "saving". seconds: until all ranks were gone.

    named: whether the launcher named the rank and the signal.
    newest: the step of the newest complete checkpoint, which loaded whole into the plain model.
    """

    rank: int
    moment: str
    seconds: float
    named: bool
    newest: int


def moments(count: int, saving: int, seed: int) -> list[tuple[str, int, float]]:
    """Moment, rank and a fraction of the time it lasts, of each kill."""
    draw = random.Random(seed)
    kinds = ["saving"] * saving + ["start"] * (count // 7)
    kinds += ["training"] * (count - len(kinds))
    draw.shuffle(kinds)
    return [(kind, draw.randrange(DEVICES), draw.random()) for kind in kinds]


def wait_until(life: Life, moment: str, rank: int, fraction: float, after: int) -> None:
    """Wait for the moment of a kill, of the start whose lines are those from `after` on."""
    if moment == "start":
        time.sleep(fraction * 8)
        return
    place = life.wait_for("resumed", after)
    if moment == "saving":
        life.wait_for(f"saving {rank}", place)
        time.sleep(fraction * SLOW_S)
    else:
        time.sleep(fraction * 4 * SLOW_S)


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint, loaded into the plain model."""
    model, optimizer = build(dropout=0.2)
    with torch.random.fork_rng():
        return graphaccel.load(folder, model, optimizer).step


def by_hand(folder: Path, kills: list[tuple[str, int, float]]) -> tuple[list[Killed], list[Any]]:
    """Kill, start again, kill, ...; each kill, and all steps with their losses."""
    results, losses, resumed = [], [], 0
    for moment, rank, fraction in [*kills, ("end", 0, 0.0)]:
        life = Life(folder, *SLOW)
        pids = life.ranks(DEVICES)
        if moment == "end":
            life.wait_for("saved", life.wait_for(f"resumed {resumed}"))
            assert life.stop() == 75, life.text()
        else:
            wait_until(life, moment, rank, fraction, 0)
            seconds = life.kill(pids[rank], [p for r, p in pids.items() if r != rank])
            named = f"graphaccel: rank {rank} ended first, with signal SIGKILL" in life.text()
            code = life.end()
            named = named or f"rank {rank} ended first, with signal SIGKILL" in life.text()
            assert code != 0, life.text()
            if f"resumed {resumed}" not in life.text():
                assert "resumed" not in life.text(), life.text()
            resumed = newest(folder)
            results.append(Killed(rank, moment, round(seconds, 2), named, resumed))
            print(results[-1], flush=True)
            if not named:
                print(life.text(), flush=True)
        losses += life.losses()
    return results, losses


def by_itself(folder: Path, kills: list[tuple[str, int, float]]) -> tuple[list[Killed], list[Any]]:
    """The same with `--max-restarts`: one job, in which a rank is killed again and again."""
    life = Life(folder, *SLOW, restarts=len(kills))
    results, known, after = [], frozenset[int](), 0
    for moment, rank, fraction in kills:
        pids = life.ranks(DEVICES, known)
        known |= frozenset(pids.values())
        wait_until(life, moment, rank, fraction, after)
        after = len(life.lines)
        seconds = life.kill(pids[rank], [p for r, p in pids.items() if r != rank])
        step = newest(folder)
        life.wait_for(f"resumed {step}", after)
        text = "\n".join(line for _, line in life.lines[after:])
        named = f"graphaccel: rank {rank} ended first, with signal SIGKILL: all ranks" in text
        results.append(Killed(rank, moment, round(seconds, 2), named, step))
        print(results[-1], flush=True)
    life.wait_for("saved", life.wait_for("resumed", after))
    assert life.stop() == 75, life.text()
    return results, life.losses()


def undisturbed(folder: Path, steps: int) -> dict[int, str]:
    """The losses of a run of so many steps."""
    life = Life(folder, "--steps", str(steps), "--every", "1000000")
    assert life.end() == 0, life.text()
    return dict(life.losses())


def other_devices(folder: Path) -> float:
    """The largest difference of a run on 4, 2 and 4 devices from one on 4, without dropout."""
    plain = ("--dropout", "0", "--every", "10")
    whole = Life(folder / "whole", "--steps", "30", *plain)
    assert whole.end() == 0, whole.text()
    losses = []
    for devices, steps in ((4, 10), (2, 20), (4, 30)):
        life = Life(folder / "changed", "--steps", str(steps), *plain, devices=devices)
        assert life.end() == 0, life.text()
        losses += life.losses()
    pairs = zip(whole.losses(), losses, strict=True)
    return max(abs(float.fromhex(a) - float.fromhex(b)) for (_, a), (_, b) in pairs)


def restarted(folder: Path, count: int) -> tuple[list[Killed], list[Any]]:
    """`by_itself` with three kills a job, over as many jobs as `count` kills take."""
    drawn = moments(count, count // 2, seed=2)
    results: list[Killed] = []
    losses: list[Any] = []
    for first in range(0, count, RESTARTS):
        more, others = by_itself(folder / f"job {first}", drawn[first : first + RESTARTS])
        results += more
        losses += others
    return results, losses


def compared(folder: Path, losses: list[Any]) -> dict[str, int]:
    """How many losses differ in a bit from those of a run that nothing disturbed."""
    whole = undisturbed(folder, max(step for step, _ in losses))
    differing = sum(whole[step] != loss for step, loss in losses)
    return {"losses_compared": len(losses), "losses_that_differ_in_a_bit": differing}


def measure(part: str, kills: int, saving: int) -> dict[str, Any]:
    """The figures of one part; raises where a run ends otherwise than it must."""
    folder = Path(tempfile.mkdtemp(prefix="graphaccel_"))
    figures: dict[str, Any] = {"machine": processor(), "torch": torch.__version__}
    if part == "devices":
        figures["largest_difference_on_4_2_4_devices"] = other_devices(folder)
    else:
        by_restart = part == "restarts"
        killed, losses = (
            restarted(folder / "runs", kills)
            if by_restart
            else by_hand(folder / "runs", moments(kills, saving, seed=1))
        )
        figures |= {
            "kills": len(killed),
            "inside_a_save": sum(k.moment == "saving" for k in killed),
            "slowest_end_seconds": max(k.seconds for k in killed),
            "named": sum(k.named for k in killed),
            **compared(folder / "whole", losses),
            "each": [asdict(kill) for kill in killed],
        }
    shutil.rmtree(folder)
    return figures


def missed(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The parts of which a figure is over its bar."""
    results = []
    for part, one in figures.items():
        wrong = one.get("losses_that_differ_in_a_bit", 0) or one.get("kills") != one.get("named")
        far = one.get("largest_difference_on_4_2_4_devices", 0) > NEAR
        if wrong or far or one.get("slowest_end_seconds", 0) > BAR_S:
            results.append(part)
    return results


def main() -> int:
    """Print the figures as JSON, and keep them beside those of the other parts; 1 if a bar is
    missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kills", type=int, default=20, help="by hand, and with --max-restarts 3")
    parser.add_argument("--saving", type=int, default=8, help="so many by hand inside a save")
    parser.add_argument("--json", type=Path, default=RESULTS / "soak_kills.json")
    asked = parser.parse_args()
    figures = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    for part in asked.parts:
        figures[part] = measure(part, asked.kills, asked.saving)
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    return int(bool(missed(figures)))


if __name__ == "__main__":
    sys.exit(main())
