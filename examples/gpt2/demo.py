"""The main job, small enough for two cores: plan it, train it on 4 processes, compare with one.

    make demo            # or: python examples/gpt2/demo.py

1. `graphaccel plan` shows what 4 devices would do, before anything is trained.
2. train.py runs on 4 processes: 2 pipeline stages, each on 2 halves of the batch.
3. train.py --eager runs the same model on the same data in plain PyTorch, one process.
4. Both loss curves, side by side and as SVG. Exit code 1 where they differ by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from plot import largest_difference, side_by_side, svg

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-3  # nats; rounding in float32 is some 1e-6 here
TITLE = "GPT-2 on Python's standard library: training loss"
PINS = ["--data", "2", "--pipeline", "2", "--interleave", "1"]
BATCH, SEQUENCE, VOCABULARY = 16, 128, 2048
LAYERS, WIDTH, HEADS = 4, 160, 4


def settings(steps: int) -> list[str]:
    """What both runs share, as arguments of train.py."""
    sizes = {
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "batch": BATCH,
        "sequence": SEQUENCE,
        "vocabulary": VOCABULARY,
        "corpus-bytes": 4_000_000,
        "steps": steps,
        "evaluate-every": max(1, steps // 2),
    }
    return [argument for name, value in sizes.items() for argument in (f"--{name}", str(value))]


def job() -> tuple[nn.Module, tuple[Tensor, Tensor], None, Optimizer]:
    """The demo's model, one batch, no loss function (the model computes its loss), its optimizer.

    For `graphaccel plan examples/gpt2/demo.py:job`.
    """
    import torch
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(VOCABULARY, SEQUENCE, LAYERS, HEADS, WIDTH))
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    return model, (tokens, tokens.clone()), None, torch.optim.AdamW(model.parameters())


def run(title: str, command: list[str]) -> None:
    """Run a command with its output on ours; SystemExit with its exit code where it fails."""
    shown = " ".join(part.removeprefix(f"{HERE}/") for part in command[1:])
    print(f"\n=== {title}\n$ python {shown}", flush=True)
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(f"demo: `{title}` failed with exit code {code}")
    print(f"=== {time.perf_counter() - started:.0f} s", flush=True)


def train(title: str, processes: int, arguments: list[str]) -> list[float]:
    """The loss of every step of one run of train.py; SystemExit if not on `processes` of them."""
    with tempfile.TemporaryDirectory() as folder:
        curve = Path(folder, "curve.json")
        run(title, [sys.executable, str(HERE / "train.py"), *arguments, "--curve", str(curve)])
        result = json.loads(curve.read_text())
    if result["processes"] != processes:
        raise SystemExit(f"demo: `{title}` ran on {result['processes']} processes")
    return result["losses"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plan, train on 4 processes, compare with one.")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--svg", type=Path, default=Path("demo_loss.svg"), help="plot to write")
    parser.add_argument("--json", type=Path, help="file for the losses of both runs")
    args = parser.parse_args(argv)
    common = settings(args.steps)

    plan = [sys.executable, "-m", "graphaccel", "plan", f"{HERE / 'demo.py'}:job"]
    run("the plan, before anything runs", [*plan, "--devices", "4", *PINS])
    many = train("4 processes: data 2 x pipeline 2", 4, [*common, "--devices", "4", *PINS])
    one = train("1 process: plain PyTorch", 1, [*common, "--eager"])

    curves = {"graphaccel, data 2 x pipeline 2": many, "plain PyTorch, 1 process": one}
    print("\n=== training loss, nats per token\n")
    print(side_by_side(curves))
    drawn = {name: [round(loss, 6) for loss in losses] for name, losses in curves.items()}
    args.svg.write_text(svg(drawn, TITLE))
    if args.json is not None:
        args.json.write_text(json.dumps(drawn, indent=0) + "\n")
    step, difference = largest_difference(many, one)
    same = difference <= TOLERANCE
    verdict = "within" if same else "NOT within"
    print(f"\nlargest difference {difference:.2e} (step {step}), {verdict} {TOLERANCE:g}")
    print(f"plot: {args.svg}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
