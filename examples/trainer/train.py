"""Pretrain a small GPT-2 with Hugging Face's Trainer, on any number of devices.

    python examples/trainer/train.py                                # the launcher says how many
    graphaccel run --devices 2 examples/trainer/train.py
    graphaccel run --devices 2 --pipeline 2 examples/trainer/train.py --resume

The text is the help of Python itself, which every machine has; a token is a byte.
"""

import argparse
from pathlib import Path
from pydoc_data import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from graphaccel.integrations.transformers import Trainer

parser = argparse.ArgumentParser(description="Pretrain a small GPT-2.")
parser.add_argument("--folder", type=Path, default=Path("trainer"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
options = parser.parse_args()


class Text(torch.utils.data.Dataset):
    """Rows of `length` bytes of a text."""

    def __init__(self, text: str, length: int) -> None:
        data = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()
        self.rows = data[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


text = "".join(topics.topics.values())
cut = len(text) // 20
torch.manual_seed(0)
trainer = Trainer(
    model=GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=options.length,
            n_embd=64,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    args=TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        logging_steps=max(1, options.steps // 10),
        eval_strategy="steps",
        eval_steps=options.steps // 2,
        save_steps=options.steps // 2,
        report_to=[],
    ),
    train_dataset=Text(text[cut:], options.length),
    eval_dataset=Text(text[:cut], options.length),
)
trainer.train(resume_from_checkpoint=options.resume)
trainer.save_model(str(options.folder / "model"))
