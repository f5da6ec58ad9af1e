"""`graphaccel train` learns each task, on one and several processes; its folder loads elsewhere."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from graphaccel.cli.main import main
from tests.training import corpora

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the libraries: what they deprecate is not ours
]

SMALL = {
    "gpt2": ("n_layer=2", "n_embd=32", "n_head=2", "n_positions=32"),
    "bert": ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
             "intermediate_size=64", "max_position_embeddings=32"),
    "t5": ("num_layers=1", "d_model=32", "num_heads=2", "d_kv=16", "d_ff=64"),
    "vit": ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2",
            "intermediate_size=64", "image_size=16", "patch_size=4", "num_channels=1"),
}  # fmt: skip
NO_DROPOUT = {
    "gpt2": ("resid_pdrop=0.0", "embd_pdrop=0.0", "attn_pdrop=0.0"),
    "bert": ("hidden_dropout_prob=0.0", "attention_probs_dropout_prob=0.0"),
    "t5": ("dropout_rate=0.0",),
    "vit": (),
}


def words(task: str, model: str, data: Path, folder: Path, *more: str) -> list[str]:
    changes = [word for field in SMALL[model] + NO_DROPOUT[model] for word in ("--set", field)]
    return [
        "train", "--task", task, "--model", model, *changes, "--data", str(data), "--output",
        str(folder), "--length", "32", "--lr", "1e-2", "--warmup-steps", "2", "--metrics",
        str(folder.with_suffix(".jsonl")), "--log-interval", "5", "--eval-batches", "4", *more,
    ]  # fmt: skip


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in folder.with_suffix(".jsonl").read_text().splitlines()]


def evaluated(folder: Path) -> dict[str, float]:
    return [line for line in lines_of(folder) if "eval_loss" in line][-1]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def test_causal_lm_learns_and_loads(tmp_path: Path) -> None:
    data, folder = corpora.help_texts(tmp_path / "text.jsonl"), tmp_path / "out"
    assert (
        main(words("causal-lm", "gpt2", data, folder, "--tokenizer", "bytes", "--steps", "40")) == 0
    )
    assert evaluated(folder)["eval_loss"] < 3.0 < math.log(256)
    line = lines_of(folder)[0]
    assert line["step"] == 5
    assert line["tokens_per_second"] == pytest.approx(line["rows_per_second"] * 32, rel=1e-3)
    assert line["predicted_seconds"] > 0
    assert 0 < line["mfu"] < 1
    assert 0 < line["predicted_peak_bytes"] < line["resident_peak_bytes"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("The statement", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "The statement"
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 4.0


def test_masked_lm_learns(tmp_path: Path) -> None:
    data, folder = corpora.help_texts(tmp_path / "text.jsonl"), tmp_path / "out"
    more = ("--tokenizer", "bytes", "--steps", "40", "--reset-documents")
    assert main(words("masked-lm", "bert", data, folder, *more)) == 0
    assert evaluated(folder)["eval_loss"] < 3.6


def test_sequence_classification_learns(tmp_path: Path) -> None:
    data, folder = corpora.words_of_either_case(tmp_path / "lines.jsonl"), tmp_path / "out"
    more = ("--tokenizer", "bytes", "--steps", "40", "--split", "80,20")
    assert main(words("sequence-classification", "bert", data, folder, *more)) == 0
    assert evaluated(folder)["eval_accuracy"] > 0.85
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    assert config.label2id == {"capital": 0, "small": 1}


def test_seq2seq_learns(tmp_path: Path) -> None:
    data, folder = corpora.words_in_capitals(tmp_path / "pairs.jsonl"), tmp_path / "out"
    more = ("--tokenizer", "bytes", "--steps", "60", "--split", "80,20")
    assert main(words("seq2seq", "t5", data, folder, *more)) == 0
    assert evaluated(folder)["eval_loss"] < 4.0 < math.log(256)


def test_image_classification_learns(tmp_path: Path) -> None:
    data, folder = corpora.pictures_of_bytes(tmp_path / "bytes.npz"), tmp_path / "out"
    more = ("--steps", "60", "--split", "80,20", "--lr", "3e-3")
    assert main(words("image-classification", "vit", data, folder, *more)) == 0
    assert evaluated(folder)["eval_accuracy"] > 0.85


@pytest.mark.release
@pytest.mark.multiprocess
def test_two_processes_train_as_one_and_resume_under_another_plan(tmp_path: Path) -> None:
    data = corpora.help_texts(tmp_path / "text.jsonl")
    steps = ("--tokenizer", "bytes", "--steps", "6", "--log-interval", "1", "--save-interval", "4")
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert main(words("causal-lm", "gpt2", data, alone, *steps)) == 0
    more = ("--devices", "2", "--pipeline", "2", "--micro-batch", "4")
    assert started(words("causal-lm", "gpt2", data, both, *steps, *more)) == 0
    expected = [line["loss"] for line in lines_of(alone) if "loss" in line]
    got = [line["loss"] for line in lines_of(both) if "loss" in line]
    assert got == pytest.approx(expected, rel=1e-5)
    (both / "checkpoint-6").rename(tmp_path / "last")
    assert main(words("causal-lm", "gpt2", data, both, *steps, "--resume")) == 0
    resumed = [line["loss"] for line in lines_of(both) if "loss" in line]
    assert resumed[6:] == pytest.approx(expected[4:], rel=1e-5)


def started(arguments: list[str]) -> int:
    """The exit code of the command in a process of its own, which starts the ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphaccel", *arguments]
    return subprocess.run(command, env=environment, check=False, timeout=300).returncode
