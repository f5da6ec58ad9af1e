"""The same 20 updates by four kinds of loops, under plans and without graphaccel.

    python -m benchmarks.loops                          the table; benchmarks/results/loops.json
    python -m benchmarks.loops --loops trainer plain --plans zero3

A classifier of BERT's kind in float32, on pairs of sentences: two microsteps an update, clipping, a
schedule with warm-up, an evaluation at updates 10 and 20 over rows that are no whole number of
batches. Each loop is run without graphaccel, under a plan for one process and under four for two.
Shown are the largest difference of a loss, whether the accuracy is the same, and whether a run that
resumes at update 10 in new processes has the same losses as the run that saved, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "loops.json"
LOOPS = ("plain", "trainer", "accelerate", "lightning")
PLANS: dict[str, dict[str, Any]] = {
    "one": {"devices": 1},
    "data": {"data": 2},
    "zero3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}
UPDATES, HALF, ROWS, EVALUATED, WORDS, LENGTH = 20, 10, 8, 37, 32, 12
CLIP, RATE, WARMUP = 0.5, 5e-3, 5
BAR = 1e-5
Found = dict[str, Any]


def model() -> Any:
    """The classifier; its weights are the same everywhere."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs whose halves are the same or not."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, WORDS, (count, LENGTH), generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    half = LENGTH // 2
    ids[:, half:] = torch.where(labels[:, None] == 1, ids[:, :half], ids[:, half:])
    return [{"input_ids": i, "labels": n} for i, n in zip(ids, labels, strict=True)]


def batches(of: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """In their order; the last one may be smaller."""
    from torch.utils.data import default_collate

    return [default_collate(of[i : i + size]) for i in range(0, len(of), size)]


def training() -> list[dict[str, Any]]:
    """Rows of the training, two batches an update."""
    return rows(2 * ROWS * UPDATES, 1)


def optimizers(of: Any) -> tuple[Any, Any]:
    """The optimizer of a model and its schedule."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(of.parameters(), lr=RATE)
    return optimizer, get_linear_schedule_with_warmup(optimizer, WARMUP, UPDATES)


def accuracy(of: Any) -> float:
    """Share of the evaluated rows that a model classifies as they are labelled."""
    import torch

    of.eval()
    right = 0
    with torch.no_grad():
        for batch in batches(rows(EVALUATED, 2), 2 * ROWS):
            right += int((of(**batch).logits.argmax(-1) == batch["labels"]).sum())
    of.train()
    return right / EVALUATED


def plain(plan: dict[str, Any] | None, folder: Path, resumes: bool) -> Found:
    """A loop of one's own."""
    import torch

    import graphaccel

    net = model()
    optimizer, schedule = optimizers(net)
    done = 0
    if plan is not None:
        graphaccel.optimize(net, optimizer, **plan)
    if resumes:
        done = graphaccel.load(folder, net, optimizer, schedule=schedule).step
    losses, found = [], []
    each = batches(training(), ROWS)
    for update in range(done, UPDATES):
        for batch in each[2 * update : 2 * update + 2]:
            loss = net(**batch).loss
            (loss / 2).backward()
            losses.append(float(loss))
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if update + 1 in (HALF, UPDATES):
            found.append(accuracy(net))
        if update + 1 == HALF and plan is not None:
            graphaccel.save(folder, net, optimizer, step=HALF, schedule=schedule)
    return {"losses": losses, "accuracy": found}


def trainer(plan: dict[str, Any] | None, folder: Path, resumes: bool) -> Found:
    """Trainer of transformers."""
    import transformers

    from graphaccel.integrations.transformers import Trainer

    transformers.utils.logging.disable_progress_bar()
    net = model()
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=ROWS, per_device_eval_batch_size=2 * ROWS,
        gradient_accumulation_steps=2, max_steps=UPDATES, logging_steps=1, save_steps=HALF,
        eval_strategy="steps", eval_steps=HALF, learning_rate=RATE, warmup_steps=WARMUP,
        max_grad_norm=CLIP, report_to=[], use_cpu=True, disable_tqdm=True, log_level="error",
    )  # fmt: skip
    kind, more = (transformers.Trainer, {}) if plan is None else (Trainer, {"optimize": plan})
    run = kind(
        model=net, args=arguments, train_dataset=training(), eval_dataset=rows(EVALUATED, 2),
        compute_metrics=lambda p: {
            "accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())
        },
        **more,
    )  # fmt: skip
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resumes else None)
    history = run.state.log_history
    if resumes:  # its history starts with that of the run before
        history = [row for row in history if row["step"] > HALF]
    return {
        "losses": [row["loss"] for row in history if "loss" in row],
        "accuracy": [row["eval_accuracy"] for row in history if "eval_accuracy" in row],
    }


def accelerate(plan: dict[str, Any] | None, folder: Path, resumes: bool) -> Found:
    """A loop around Accelerate's Accelerator."""
    import torch
    from accelerate import Accelerator as Usual

    from graphaccel.integrations.accelerate import Accelerator

    kind, more = (Usual, {"cpu": True}) if plan is None else (Accelerator, {"optimize": plan})
    own = kind(gradient_accumulation_steps=2, **more)
    net = model()
    optimizer, schedule = optimizers(net)
    loader = torch.utils.data.DataLoader(training(), batch_size=ROWS)
    net, optimizer, schedule, loader = own.prepare(net, optimizer, schedule, loader)
    done = 0
    if resumes:
        own.load_state(str(folder))
        done = HALF
        loader = own.skip_first_batches(loader, 2 * HALF)
    losses, found = [], []
    for number, batch in enumerate(loader, 2 * done + 1):
        with own.accumulate(net):
            loss = net(**batch).loss
            own.backward(loss)
            if own.sync_gradients:
                own.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(own.gather_for_metrics(loss.detach()).mean()))
        if number in (2 * HALF, 2 * UPDATES):
            found.append(accuracy(net))
        if number == 2 * HALF and plan is not None:
            own.save_state(str(folder))
    return {"losses": losses, "accuracy": found}


def lightning(plan: dict[str, Any] | None, folder: Path, resumes: bool) -> Found:
    """Trainer of Lightning."""
    import lightning as library
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from graphaccel.integrations.lightning import PlannedStrategy

    class Classifier(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, **batch: Any) -> Any:
            return self.net(**batch)

        def training_step(self, batch: Any, _: int) -> Any:
            return self(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizers(self)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Seen(Callback):
        losses, found = [], []

        def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))
            if run.global_step in (HALF, UPDATES) and len(self.losses) % 2 == 0:
                self.found.append(accuracy(module))

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    seen = Seen()
    strategy = "auto" if plan is None else PlannedStrategy(**{"devices": 2, **plan})
    files = ModelCheckpoint(folder, "{step}", every_n_train_steps=HALF, save_top_k=-1)
    run = library.Trainer(
        max_steps=UPDATES, accelerator="cpu", devices=1, strategy=strategy,
        gradient_clip_val=CLIP, accumulate_grad_batches=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[seen, files],
    )  # fmt: skip
    # Two epochs: in the middle of one Lightning resumes with its first batches, with a plan or not.
    loader = torch.utils.data.DataLoader(training()[: ROWS * UPDATES], batch_size=ROWS)
    file = str(folder / f"step={HALF}.ckpt") if resumes else None
    run.fit(Classifier(), loader, ckpt_path=file)
    return {"losses": seen.losses, "accuracy": seen.found}


def _as_rank(loop: str, plan: str, folder: str, resumes: bool) -> None:
    """Run one loop in this process, as its script would; the first rank writes what it saw."""
    warnings.simplefilter("ignore")
    run = {"plain": plain, "trainer": trainer, "accelerate": accelerate, "lightning": lightning}
    found = run[loop](PLANS.get(plan), Path(folder) / "saved", resumes)
    if os.environ.get("RANK", "0") == "0":
        (Path(folder) / ("resumed" if resumes else "whole")).write_text(json.dumps(found))


def _found(loop: str, plan: str, folder: Path, resumes: bool = False) -> Found:
    """What a loop sees in processes of its own."""
    words = [str(Path(__file__)), "--as-rank", loop, plan, str(folder), *["--resumes"] * resumes]
    count = "1" if plan in ("none", "one") else "2"
    start = [] if count == "1" else ["-m", "graphaccel", "run", "--devices", count]
    root = Path(__file__).parents[1]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *start, *words], check=False, capture_output=True, text=True,
        env={**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GRAPHACCEL_QUIET": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{loop} under {plan}:\n{done.stderr[-3000:]}")
    return json.loads((folder / ("resumed" if resumes else "whole")).read_text())  # type: ignore[no-any-return]


def compared(loop: str, plan: str, reference: Found) -> dict[str, Any]:
    """One loop under one plan, beside itself without graphaccel."""
    with tempfile.TemporaryDirectory(prefix="graphaccel_") as made:
        whole = _found(loop, plan, Path(made))
        again = _found(loop, plan, Path(made), resumes=True)
    pairs = zip(whole["losses"], reference["losses"], strict=True)
    half = len(again["losses"])
    return {
        "loop": loop,
        "plan": plan,
        "losses": len(whole["losses"]),
        "apart": max(abs(a - b) for a, b in pairs),
        "accuracy": whole["accuracy"],
        "same_accuracy": whole["accuracy"] == reference["accuracy"],
        "resumed": half,
        "resumed_bitwise": 2 * half == len(whole["losses"])
        and again["losses"] == whole["losses"][half:],
    }


def main() -> int:
    """Print the table and keep it; 1 if a row is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--plans", nargs="+", choices=[*PLANS], default=[*PLANS])
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--resumes", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        _as_rank(*given.as_rank, given.resumes)
        return 0
    made = []
    for loop in given.loops:
        with tempfile.TemporaryDirectory(prefix="graphaccel_") as folder:
            reference = _found(loop, "none", Path(folder))
        for plan in given.plans:
            made.append(compared(loop, plan, reference))
            row = made[-1]
            print(
                f"{loop:11} {plan:9} {row['losses']:3} losses, apart {row['apart']:.1e}   accuracy "
                f"{'same' if row['same_accuracy'] else 'DIFFERS'} {row['accuracy']}   resumed "
                f"{row['resumed']} losses, {'bitwise' if row['resumed_bitwise'] else 'DIFFER'}",
                flush=True,
            )
    if len(made) == len(LOOPS) * len(PLANS):
        RESULT.write_text(json.dumps(made, indent=1) + "\n")
    right = (r["apart"] <= BAR and r["same_accuracy"] and r["resumed_bitwise"] for r in made)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
