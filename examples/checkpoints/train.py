"""Save and resume when a plan leaves each process with a part of the parameters.

    python examples/checkpoints/train.py --devices 2                  # trains and saves
    python examples/checkpoints/train.py --devices 2 --resume         # goes on
    python examples/checkpoints/train.py --devices 2 --sharded        # torch.distributed.checkpoint
    python examples/checkpoints/train.py --devices 2 --sharded --resume --pipeline 1 --zero 3

The weights are one file that the plain model can load too. The state of the optimizer is one file
for each process, since each holds that of its own parameters: it resumes under the same plan. With
--sharded every process writes its part of both, and any plan can go on from it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import graphaccel

parser = argparse.ArgumentParser(description="Train, save and resume under a pipeline.")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--pipeline", type=int, default=2)
parser.add_argument("--zero", type=int, default=0)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--folder", type=Path, default=Path("checkpoint"))
parser.add_argument("--resume", action="store_true", help="go on from the folder")
parser.add_argument("--sharded", action="store_true", help="each process writes its own part")
args = parser.parse_args()

torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = torch.randn(16, 32), torch.randn(16, 32)

model, optimizer = graphaccel.optimize(
    model,
    optimizer,
    devices=args.devices,
    loss_fn=nn.functional.mse_loss,
    example_batch=(x, y),  # plan now, so that parameters are where they belong before loading
    pipeline=args.pipeline,
    zero=args.zero,
)
rank = int(os.environ.get("RANK", "0"))


def parts() -> dict:
    """What this process holds of the model and the optimizer."""
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


if args.resume and args.sharded:
    state = parts()
    dcp.load(state, checkpoint_id=args.folder / "parts")
    model.load_state_dict(state["model"])
    partly = StateDictOptions(strict=False)  # parameters of other stages have no state here
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=partly)
elif args.resume:
    model.load_state_dict(torch.load(args.folder / "weights.pt"))
    optimizer.load_state_dict(torch.load(args.folder / f"optimizer-{rank}.pt"))

for _ in range(args.steps):
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}", flush=True)

args.folder.mkdir(parents=True, exist_ok=True)
if args.sharded:
    dcp.save(parts(), checkpoint_id=args.folder / "parts")
else:
    torch.save(optimizer.state_dict(), args.folder / f"optimizer-{rank}.pt")
    weights = graphaccel.full_state_dict(model)  # every process calls it, and gets all of them
    if rank == 0:
        torch.save(weights, args.folder / "weights.pt")
