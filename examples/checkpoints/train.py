"""Save, resume, change the plan, and export, when a plan leaves each process with a part.

    python examples/checkpoints/train.py --devices 2                            # trains and saves
    python examples/checkpoints/train.py --devices 2                            # goes on
    python examples/checkpoints/train.py --devices 2 --pipeline 1 --zero 3      # under another plan
    python examples/checkpoints/train.py --devices 1 --pipeline 1 --export weights

Each checkpoint has a folder of its own in --folder, and counts when it is complete: a run that is
killed while it saves goes on from the one before.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import graphaccel

parser = argparse.ArgumentParser(description="Train, save, resume and export.")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--pipeline", type=int, default=2)
parser.add_argument("--zero", type=int, default=0)
parser.add_argument("--steps", type=int, default=5, help="how many to train now")
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
parser.add_argument("--asynchronous", action="store_true", help="write in the background")
parser.add_argument("--export", type=Path, help="write safetensors here at the end")
args = parser.parse_args()

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
x, y = torch.randn(16, 32), torch.randn(16, 32)

model, optimizer = graphaccel.optimize(
    model,
    optimizer,
    devices=args.devices,
    loss_fn=nn.functional.mse_loss,
    example_batch=(x, y),  # plan now: each process then loads only its own part
    pipeline=args.pipeline,
    zero=args.zero,
)
start = graphaccel.load(args.folder, model, optimizer, scheduler=scheduler).step

for step in range(start + 1, start + args.steps + 1):
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step % 5 == 0 or step == start + args.steps:
        graphaccel.save(
            args.folder,
            model,
            optimizer,
            step=step,
            scheduler=scheduler,
            keep=2,
            asynchronous=args.asynchronous,
        )
if args.export is not None:
    graphaccel.export(args.export, model)
