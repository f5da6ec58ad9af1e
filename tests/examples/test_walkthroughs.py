"""The walk-throughs: what their READMEs have one type first is run, and the full sizes are real."""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from graphaccel.cli.main import main
from graphaccel.training.models import make_model, read_config
from graphaccel.training.settings import model_task, settings_of

from .conftest import EXAMPLES, ROOT

WALKTHROUGHS = (
    "bert", "gpt2_pretrain", "llama_lora", "moe", "own_layers", "seq2seq", "vision"
)  # fmt: skip
SHORT = ("llama_lora",)
"""The others train longer, or on more processes; of them a few steps are run in any case."""
STEPS = ("--steps", "2", "--eval-batches", "1", "--global-batch", "4", "--log-interval", "1")
FEW_STEPS = {
    "bert/small.yaml": ("--set", "num_hidden_layers=1"),
    "gpt2_pretrain/small.yaml": ("--set", "n_layer=1"),
    "moe/small.yaml": ("--warmup-steps", "1", "--set", "num_hidden_layers=1"),
    "seq2seq/small.yaml": (
        "--warmup-steps", "1", "--set", "num_layers=1", "--set", "num_decoder_layers=1"
    ),
    "vision/small_resnet.yaml": (
        "--warmup-steps", "1", "--set", "hidden_sizes=[8]", "--set", "depths=[1]"
    ),
}  # fmt: skip
PROGRAMS = {"python": [sys.executable], "graphaccel": [sys.executable, "-m", "graphaccel"]}
BILLION = 1e9
FULL = {
    "gpt2_pretrain/full.yaml": 0.355,
    "bert/full.yaml": 0.336,
    "seq2seq/full.yaml": 0.223,
    "moe/full.yaml": 6.98,
    "vision/vit.yaml": 0.304,
    "vision/resnet.yaml": 0.0256,
}
"""Parameters in billions, as the literature has them for the vocabularies there."""


def first_commands(name: str) -> list[str]:
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    here = text.split("## Here\n")[1]
    block = re.search(r"^```sh\n(.*?)^```", here, flags=re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def run(command: str, folder: Path) -> str:
    program, *words = shlex.split(command)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"
    }  # fmt: skip
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        [*PROGRAMS[program], *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def losses(out: str) -> list[float]:
    return [float(x) for x in re.findall(r"\bloss'?:? +'?(\d+\.\d+)", out)]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.release) for n in WALKTHROUGHS]
)
def test_what_one_types_first_runs_and_learns(name: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    trained = 0
    for command in first_commands(name):
        found = losses(run(command, tmp_path))
        if len(found) > 2 and "--resume" not in command:
            assert found[-1] < found[0]
            trained += 1
    assert trained >= 1
    if name == "gpt2_pretrain":
        assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_few_steps_of_each(
    run_here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files and scripts, with one layer, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    for kind, file in (
        ("text", "text.jsonl"),
        ("pairs", "pairs.jsonl"),
        ("pictures", "pictures.npz"),
    ):
        run_here("corpus.py", kind, file)
    run_here(
        "gpt2_pretrain/tokenizer.py",
        "text.jsonl",
        "--vocabulary",
        "512",
        "--output",
        "tokenizer.json",
    )
    for file, words in FEW_STEPS.items():
        assert main(["train", "--config", str(EXAMPLES / file), *STEPS, *words]) == 0
        settings = yaml.safe_load((EXAMPLES / file).read_text())
        logged = Path(settings["metrics"]).read_text().splitlines()
        assert sum('"loss"' in line for line in logged) == 2
    generate = ("--model", "gpt2/model", "--num-samples", "1", "--out-seq-length", "2")
    assert run_here("gpt2_pretrain/generate.py", *generate)
    own = run_here("own_layers/train.py", "--blocks", "1", "--width", "16", "--steps", "2")
    assert len(losses(own)) == 2


def test_at_most_two_lines_of_a_script_change() -> None:
    page = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```diff\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        added = re.findall(r"^\+(.*)$", block, re.MULTILINE)
        assert 1 <= len(added) <= 2
        for line in added:
            compile(line, "page", "exec")
            if line.startswith("from "):
                exec(line, {})


@pytest.mark.parametrize("file", FULL)
def test_full_sizes_are_those_that_are_named(file: str) -> None:
    settings, pins = settings_of(argparse.Namespace(), EXAMPLES / file)
    config = read_config(settings.model, settings.model_settings)
    if file == "seq2seq/full.yaml":
        config.vocab_size = 32_128
    if file == "vision/vit.yaml" or file == "vision/resnet.yaml":
        config.num_labels = 1000
    with torch.device("meta"):
        model = make_model(model_task(settings), settings.model, config)
    count = sum(parameter.numel() for parameter in model.parameters()) / BILLION
    assert count == pytest.approx(FULL[file], rel=0.01)
    assert set(pins) <= {"precision", "recompute"}


def test_one_line_of_the_fine_tuning_is_changed() -> None:
    page = (EXAMPLES / "bert/README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```diff\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (before,), (after,) = (re.findall(rf"^\{sign}(.*)$", block, re.MULTILINE) for sign in "-+")
    assert before == "from transformers import Trainer"
    script = (EXAMPLES / "bert/finetune.py").read_text(encoding="utf-8").split('"""')[2]
    assert [line for line in script.splitlines() if "graphaccel" in line] == [after]


def test_small_and_full_settings_are_of_one_task() -> None:
    for folder in WALKTHROUGHS:
        tasks = {yaml.safe_load(f.read_text())["task"] for f in (EXAMPLES / folder).glob("*.yaml")}
        assert len(tasks) <= 1


def test_a_dialogue_ends_at_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of a dialogue, of a file and of nothing; with and without a cache the same text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2, "c": 3}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=4, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    ).save_pretrained(tmp_path)
    script = str(EXAMPLES / "gpt2_pretrain/generate.py")
    few = [script, "--model", str(tmp_path), "--out-seq-length", "4", "--num-samples", "2"]

    def said(*words: str, typed: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [*few, *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(script, run_name="__main__")
        return capsys.readouterr().out

    assert said("--interactive", typed="a b\nstop\nc\n").count("prompt (stop ends)") == 2
    (tmp_path / "prompts.txt").write_text("a b c a b c a b c\nb\n")
    file = ("--sample-input-file", str(tmp_path / "prompts.txt"))
    assert said(*file) == said(*file, "--no-cache")
    assert len(said("--temperature", "0").split("\n\n")) == 3
