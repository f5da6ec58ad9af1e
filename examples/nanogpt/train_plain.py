"""Train a byte-level GPT, in the style of nanoGPT: two copies of one script.

    python examples/nanogpt/train_plain.py                          # plain PyTorch
    graphaccel run --devices 2 examples/nanogpt/train.py            # one line more, and its import

The text is any file, byte by byte, so nothing has to be prepared; by default it is the language
reference that Python carries for its help().
"""

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from model import GPT, GPTConfig

topics = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
parser = argparse.ArgumentParser(description="Train a byte-level GPT on a file.")
parser.add_argument("--text", type=Path, default=topics, help="the file to learn")
parser.add_argument("--out", type=Path, default=Path("nanogpt.pt"), help="checkpoint")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
parser.add_argument("--max-iters", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=8, help="rows of one accumulation step")
parser.add_argument("--block-size", type=int, default=128)
parser.add_argument("--n-layer", type=int, default=4)
parser.add_argument("--n-head", type=int, default=4)
parser.add_argument("--n-embd", type=int, default=128)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--min-lr", type=float, default=1e-4)
parser.add_argument("--warmup-iters", type=int, default=10)
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--grad-clip", type=float, default=1.0)
parser.add_argument("--eval-interval", type=int, default=50)
parser.add_argument("--eval-iters", type=int, default=5)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(1337)
device_type = "cuda" if torch.cuda.is_available() else "cpu"
device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device_type == "cuda" else "cpu"

text = np.memmap(args.text, dtype=np.uint8, mode="r")
cut = int(0.9 * len(text))
splits = {"train": text[:cut], "val": text[cut:]}


def get_batch(split):
    data = splits[split]
    ix = torch.randint(len(data) - args.block_size, (args.batch_size,))
    rows = np.stack([data[i : i + args.block_size + 1] for i in ix.tolist()]).astype(np.int64)
    rows = torch.from_numpy(rows).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def get_lr(it):
    if it < args.warmup_iters:
        return args.learning_rate * (it + 1) / (args.warmup_iters + 1)
    ratio = (it - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    coefficient = 0.5 * (1.0 + math.cos(math.pi * min(1.0, ratio)))
    return args.min_lr + coefficient * (args.learning_rate - args.min_lr)


iter_num = 0
best_val_loss = math.inf
config = GPTConfig(
    args.block_size, 256, args.n_layer, args.n_head, args.n_embd, dropout=args.dropout
)
if args.resume:
    checkpoint = torch.load(args.out, map_location=device, weights_only=True)
    config = GPTConfig(**checkpoint["config"])
    iter_num = checkpoint["iter_num"]
    best_val_loss = checkpoint["best_val_loss"]
model = GPT(config).to(device)
optimizer = model.configure_optimizers(
    args.weight_decay, args.learning_rate, (0.9, 0.95), device_type
)
if args.resume:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"].cpu())
    print(f"resumed {args.out} at iteration {iter_num}", flush=True)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in splits:
        losses = torch.zeros(args.eval_iters)
        for k in range(args.eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


def save_checkpoint():
    # Written beside and renamed, so that a run stopped half-way leaves the last one whole.
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": vars(config),
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "rng": torch.get_rng_state(),
    }
    partial = args.out.with_suffix(f".{os.getpid()}")
    torch.save(checkpoint, partial)
    os.replace(partial, args.out)
    print(f"saved {args.out}", flush=True)


first_iter = iter_num
while True:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # The checkpoint was written just after an evaluation: it is not repeated on resuming.
    resumed_here = args.resume and iter_num == first_iter
    if (iter_num % args.eval_interval == 0 or iter_num == args.max_iters) and not resumed_here:
        losses = estimate_loss()
        print(
            f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}",
            flush=True,
        )
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                save_checkpoint()
    if iter_num >= args.max_iters:
        break

    t0 = time.time()
    for _ in range(args.gradient_accumulation_steps):
        X, Y = get_batch("train")
        _, loss = model(X, Y)
        loss = loss / args.gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % args.log_interval == 0:
        elapsed = (time.time() - t0) * 1000
        total = loss.item() * args.gradient_accumulation_steps
        print(f"iter {iter_num}: loss {total:.4f}, time {elapsed:.2f}ms", flush=True)
    iter_num += 1
