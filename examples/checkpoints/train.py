"""Save and resume when a plan leaves each process with a part of the parameters.

    python examples/checkpoints/train.py --devices 2                  # trains and saves
    python examples/checkpoints/train.py --devices 2 --resume         # goes on
    python examples/checkpoints/train.py --devices 2 --sharded        # torch.distributed.checkpoint
    python examples/checkpoints/train.py --devices 2 --sharded --resume --pipeline 1 --zero 3

The weights are one file that the plain model can load too. The state of the optimizer is one file
for each process, since each holds that of its own parameters: it resumes under the same plan. With
--sharded every process writes its part of both, and any plan can go on from it.

Each checkpoint has a folder of its own. `latest` names the newest that is complete: it is written
last, at once, so that a run that is killed while it saves leaves the checkpoint before as it was.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
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


root = args.folder / ("parts" if args.sharded else "whole")
latest = root / "latest"
if latest.exists() and not args.resume:
    raise SystemExit(f"{root} has checkpoints: --resume, or another --folder")
done = 0
if args.resume:
    folder = root / latest.read_text()
    done = int(folder.name.removeprefix("step-"))
if args.resume and args.sharded:
    state = parts()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    partly = StateDictOptions(strict=False)  # parameters of other stages have no state here
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=partly)
elif args.resume:
    model.load_state_dict(torch.load(folder / "weights.pt"))
    optimizer.load_state_dict(torch.load(folder / f"optimizer-{rank}.pt"))

for _ in range(args.steps):
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.6f}", flush=True)

folder = root / f"step-{done + args.steps}"  # never the one that `latest` names
folder.mkdir(parents=True, exist_ok=True)
if args.sharded:
    dcp.save(parts(), checkpoint_id=folder)
else:
    torch.save(optimizer.state_dict(), folder / f"optimizer-{rank}.pt")
    weights = graphaccel.full_state_dict(model)  # every process calls it, and gets all of them
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
if dist.is_initialized():
    dist.barrier()  # every process has written its part
if rank == 0:
    new = root / "latest.new"
    new.write_text(folder.name)
    new.replace(latest)  # at once: either the old name or the new one is there
