"""Train a GPT-2 on real text, on as many devices as there are.

    python examples/gpt2/train.py --devices 4                      # graphaccel chooses the split
    python examples/gpt2/train.py --devices 4 --data 2 --pipeline 2
    python examples/gpt2/train.py --eager                          # plain PyTorch, the reference
    graphaccel run --devices 4 examples/gpt2/train.py --model hf   # the same with Hugging Face's

Every line below that is not marked `graphaccel` is what the script would be without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import TextData, prepare
from model import GPT, GPTConfig
from torch import Tensor, nn

import graphaccel

PINS = ("data", "pipeline", "interleave", "microbatches", "recompute", "precision", "plan")
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
MIB = 2**20


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; the pins are graphaccel's and stay None where it may choose."""
    parser = argparse.ArgumentParser(description="Train a GPT-2 on real text.")
    add = parser.add_argument
    add("--model", choices=("plain", "hf"), default="plain", help="model.py, or transformers'")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--sequence", type=int, default=128, help="tokens per row")
    add("--batch", type=int, default=16, help="rows per step, over all devices")
    add("--steps", type=int, default=200)
    add("--warmup", type=int, default=10, help="steps of rising learning rate")
    add("--learning-rate", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add("--corpus", type=Path, help="a text file or a folder (default: Python's standard library)")
    add("--corpus-bytes", type=int, default=8_000_000, help="read at most so much of it")
    add("--vocabulary", type=int, default=4096, help="token ids of the tokenizer")
    add("--cache", type=Path, help="folder for tokenizer and tokens")
    add("--evaluate-every", type=int, default=50, help="steps; 0 never evaluates")
    add("--evaluate-batches", type=int, default=4)
    add("--log-every", type=int, default=10, help="steps between progress lines")
    add("--curve", type=Path, help="write the loss curve and the timings here, as JSON")
    add("--eager", action="store_true", help="without graphaccel, on one device")
    group = parser.add_argument_group("graphaccel")
    group.add_argument("--devices", type=int, help="default: what the launcher started, or 1")
    group.add_argument("--report", action="store_true", help="print the plan that runs")
    group.add_argument("--plan", help="a plan file, to run exactly that")
    for pin in ("data", "pipeline", "interleave", "microbatches"):
        group.add_argument(f"--{pin}", type=int, help="pin this decision of the plan")
    group.add_argument("--recompute", choices=("none", "some", "all"))
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    args = parser.parse_args(argv)
    if args.eager and (args.devices or 1) > 1:
        parser.error("--eager is plain PyTorch on one device; leave out --devices")
    return args


def build_model(args: argparse.Namespace, vocabulary: int) -> tuple[nn.Module, LossOf]:
    """The model with random weights, and how to get its loss from inputs and targets."""
    torch.manual_seed(args.seed)
    if args.model == "plain":
        config = GPTConfig(
            vocabulary, args.sequence, args.layers, args.heads, args.width, args.dropout
        )
        return GPT(config), lambda model, x, y: model(x, y)[1]

    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=args.sequence,
        n_layer=args.layers,
        n_head=args.heads,
        n_embd=args.width,
        resid_pdrop=args.dropout,
        embd_pdrop=args.dropout,
        attn_pdrop=args.dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    gpt2 = GPT2LMHeadModel(config)
    gpt2.loss_type = "ForCausalLM"  # transformers picks it anyway, with a warning
    # It shifts labels by itself: the targets are the inputs, and the last one of a row is not used.
    return gpt2, lambda model, x, y: model(input_ids=x, labels=x).loss


def build_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))


def cosine(step: int, warmup: int, steps: int) -> float:
    """Factor on the learning rate: up to 1 over `warmup` steps, then a half cosine down to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))


@torch.no_grad()
def evaluate(
    model: nn.Module, loss_of: LossOf, data: TextData, args: argparse.Namespace, device: str
) -> float:
    """Mean validation loss in nats per token, over the same batches every time."""
    model.eval()
    losses = []
    for i in range(args.evaluate_batches):
        x, y = data.get_batch("validation", args.batch, args.sequence, i, args.seed)
        losses.append(loss_of(model, x.to(device), y.to(device)).item())
    model.train()
    return statistics.fmean(losses)


def step_time(seconds: float, handle: Any) -> str:
    """`step 0.210 s (predicted 0.198)`; `handle` is `model.graphaccel`, or None without it."""
    text = f"step {seconds:.3f} s"
    return f"{text} (predicted {handle.predicted_step_seconds:.3f})" if handle else text


def peak_memory(handle: Any) -> str:
    """Peak of this process: bytes allocated on its GPU, else all resident memory."""
    if torch.cuda.is_available():
        text = f"peak {torch.cuda.max_memory_allocated() / MIB:.1f} MiB allocated"
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # elsewhere ru_maxrss is in KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        text = f"peak {peak / MIB:.0f} MiB resident"
    if handle:
        text += f" (predicted {handle.predicted_peak_bytes / MIB:.1f} in tensors)"
    return text


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu"
    data = prepare(args.corpus, args.vocabulary, args.corpus_bytes, args.cache)

    model, loss_of = build_model(args, data.vocabulary)
    model.to(device)
    optimizer = build_optimizer(model, args)
    handle = None  # what graphaccel says of the plan that runs
    if not args.eager:
        pins = {pin: getattr(args, pin) for pin in PINS if getattr(args, pin) is not None}
        model, optimizer = graphaccel.optimize(model, optimizer, devices=args.devices, **pins)
        handle = model.graphaccel
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, args.warmup, args.steps)
    )
    print(f"corpus     {data.summary}", flush=True)

    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    seconds: list[float] = []
    tokens = args.batch * args.sequence
    for step in range(args.steps):
        if args.evaluate_every and step % args.evaluate_every == 0:
            validation.append((step, evaluate(model, loss_of, data, args, device)))
            print(f"step {step:5d}  validation {validation[-1][1]:.4f}", flush=True)
        x, y = data.get_batch("train", args.batch, args.sequence, step, args.seed)
        started = time.perf_counter()
        loss = loss_of(model, x.to(device), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device, so that the time is the step's
        seconds.append(time.perf_counter() - started)
        if step == 0 and args.report and handle:
            print(handle.report(), flush=True)
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            recent = statistics.median(seconds[1:][-args.log_every :] or seconds)
            print(
                f"step {step + 1:5d}/{args.steps}  loss {losses[-1]:.4f}  "
                f"{tokens / recent:,.0f} tokens/s  {step_time(recent, handle)}  "
                f"{peak_memory(handle)}",
                flush=True,
            )
    if args.evaluate_every:
        validation.append((args.steps, evaluate(model, loss_of, data, args, device)))
        print(f"step {args.steps:5d}  validation {validation[-1][1]:.4f}", flush=True)
    if args.curve and os.environ.get("RANK", "0") == "0":
        write_curve(args, handle, losses, validation, seconds)


def write_curve(
    args: argparse.Namespace,
    handle: Any,
    losses: list[float],
    validation: list[tuple[int, float]],
    seconds: list[float],
) -> None:
    """Write losses by step, validation losses and the median step to `args.curve`, as JSON.

    The first step is left out of the median where there are others: it captures and plans.
    """
    median = statistics.median(seconds[1:] or seconds)
    result: dict[str, object] = {
        "model": args.model,
        "eager": args.eager,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "losses": losses,
        "validation": validation,
        "step_seconds": median,
        "tokens_per_second": args.batch * args.sequence / median,
    }
    if handle:
        result["predicted_step_seconds"] = handle.predicted_step_seconds
        result["predicted_peak_bytes"] = handle.predicted_peak_bytes
    args.curve.parent.mkdir(parents=True, exist_ok=True)
    args.curve.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
