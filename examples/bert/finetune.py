"""Fine-tune BERT on pairs of sentences with Hugging Face's Trainer.

    python examples/bert/finetune.py --data sentences.jsonl
    graphaccel run --devices 2 examples/bert/finetune.py --data sentences.jsonl

Each line of the data is {"text": ..., "text_pair": ..., "label": ...}. Without `--model`, a folder
with a BERT and its tokenizer, it is a small one with random weights and a token for each byte.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

from graphaccel.integrations.transformers import Trainer

parser = argparse.ArgumentParser(description="Fine-tune BERT on pairs of sentences.")
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--model", help="a folder with a model and its tokenizer")
parser.add_argument("--folder", type=Path, default=Path("finetuned"))
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--length", type=int, default=48)
parser.add_argument("--learning-rate", type=float, default=2e-3)
options = parser.parse_args()

examples = [json.loads(line) for line in options.data.read_text().splitlines()]
labels = sorted({example["label"] for example in examples})
tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None


def encoded(example: dict) -> dict:
    """`input_ids`, `token_type_ids` (1 in the second sentence), `attention_mask`, `labels`."""
    number = labels.index(example["label"])
    if tokenizer is not None:
        row = tokenizer(
            example["text"], example["text_pair"], padding="max_length", truncation=True,
            max_length=options.length,
        )  # fmt: skip
        return {**row, "labels": number}
    first, second = example["text"].encode(), example["text_pair"].encode()
    ids = [*b"\1", *first, *b"\2", *second, *b"\2"][: options.length]
    kinds = [int(place > len(first) + 1) for place in range(len(ids))]
    fill = [0] * (options.length - len(ids))
    mask = [1] * len(ids) + fill
    return {
        "input_ids": ids + fill, "token_type_ids": kinds + fill, "attention_mask": mask,
        "labels": number,
    }  # fmt: skip


def metrics(prediction) -> dict[str, float]:
    """Accuracy, and F1 of the second label, over the whole data set."""
    guesses, truth = np.argmax(prediction.predictions, -1), prediction.label_ids
    hits = np.sum((guesses == 1) & (truth == 1))
    f1 = 2 * hits / max(1, np.sum(guesses == 1) + np.sum(truth == 1))
    return {"accuracy": float(np.mean(guesses == truth)), "f1": float(f1)}


torch.manual_seed(0)
if options.model:
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=len(labels)
    )
else:
    config = BertConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=options.length, num_labels=len(labels),
    )  # fmt: skip
    model = BertForSequenceClassification(config)
rows = [encoded(example) for example in examples]
cut = len(rows) // 10
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        warmup_steps=options.steps // 10,
        logging_steps=max(1, options.steps // 5),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    ),
    train_dataset=rows[cut:],
    eval_dataset=rows[:cut],
    compute_metrics=metrics,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model(str(options.folder / "model"))
