"""Settings of `graphaccel train`: from the command line, from a file, and what is refused."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from graphaccel.cli.main import build_parser
from graphaccel.cli.pin_options import pins_of
from graphaccel.errors import BadTraining
from graphaccel.training.batch import batch_pins
from graphaccel.training.settings import Settings, add_settings, settings_of

LEAST = ["--task", "causal-lm", "--model", "gpt2", "--data", "a.jsonl"]


def read(*words: str, file: Path | None = None) -> tuple[Settings, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return settings_of(parser.parse_args(words), file)


def test_the_names_that_others_use_are_known() -> None:
    settings, _ = read(
        *LEAST, "--train-iters", "7", "--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style",
        "cosine", "--lr-warmup-fraction", "0.1", "--eval-iters", "3", "--set", "n_layer=2",
        "--set", "n_head=4",
    )  # fmt: skip
    assert settings == Settings(
        task="causal-lm", model="gpt2", data=("a.jsonl",), steps=7, learning_rate=1e-3,
        min_learning_rate=1e-4, warmup_fraction=0.1, eval_batches=3,
        model_settings=(("n_layer", "2"), ("n_head", "4")),
    )  # fmt: skip


def test_a_file_gives_settings_and_pins_and_the_command_line_goes_before_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "task: causal-lm\nmodel: gpt2\ndata: [a.jsonl, b.jsonl]\nsteps: 10\nlearning_rate: 1e-3\n"
        "model_settings: {n_layer: 2}\nresume: true\npins: {pipeline: 2}\n"
    )
    settings, pins = read("--steps", "20", file=file)
    assert (settings.steps, settings.learning_rate, settings.resume) == (20, 1e-3, True)
    assert (settings.data, settings.model_settings) == (("a.jsonl", "b.jsonl"), (("n_layer", "2"),))
    assert pins == {"pipeline": 2}


def test_a_field_that_is_typed_leaves_the_others_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "task: causal-lm\nmodel: gpt2\ndata: [a.jsonl]\nmodel_settings: {n_layer: 2, n_embd: 64}\n"
    )
    settings, _ = read("--set", "n_layer=1", "--set", "n_head=2", file=file)
    assert settings.model_settings == (("n_layer", "1"), ("n_embd", "64"), ("n_head", "2"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no TOML")
def test_a_file_may_be_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'task = "causal-lm"\nmodel = "gpt2"\ndata = ["a.jsonl"]\nlearning_rate = 1e-3\n'
        "[model_settings]\nn_layer = 2\n[pins]\npipeline = 2\n"
    )
    settings, pins = read(file=file)
    assert (settings.learning_rate, settings.model_settings) == (1e-3, (("n_layer", "2"),))
    assert pins == {"pipeline": 2}
    file.write_text("task = causal-lm\n")
    with pytest.raises(BadTraining, match="can not be read"):
        read(file=file)


@pytest.mark.parametrize(
    ("of_file", "typed", "line"),
    [
        ("warmup_fraction: 0.1", "--warmup-steps=3", "--warmup-steps, not `warmup_fraction`"),
        ("warmup_steps: 3", "--warmup-fraction=0.1", "--warmup-fraction, not `warmup_steps`"),
        ("epochs: 2", "--steps=9", "--steps, not `epochs`"),
        ("pins: {microbatches: 2}", "--micro-batch=4", "--micro-batch, not `microbatches`"),
    ],
)
def test_what_is_typed_goes_before_its_other_form_in_a_file(
    of_file: str, typed: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(of_file)
    settings, pins = read(*LEAST, typed, file=file)
    plain, _ = read(*LEAST, typed)
    assert (settings, pins) == (plain, {})
    assert f"settings   {line} of {file}" in capsys.readouterr().err


def test_microbatches_that_are_typed_go_before_the_rows_of_one_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pin is an option of the command, which the settings do not know."""
    file = tmp_path / "run.yaml"
    file.write_text("micro_batch: 4\nglobal_batch: 16\n")
    words = ["train", *LEAST, "--config", str(file)]
    typed = build_parser().parse_args([*words, "--microbatches", "2"])
    settings, pins = settings_of(typed, file)
    pins |= pins_of(typed)
    assert (settings.micro_batch, settings.global_batch, pins["microbatches"]) == (None, 16, 2)
    assert batch_pins(settings, pins, 1) == {}
    assert f"--microbatches, not `micro_batch` of {file}" in capsys.readouterr().err
    typed = build_parser().parse_args([*words, "--microbatches", "2", "--micro-batch", "8"])
    settings, pins = settings_of(typed, file)
    with pytest.raises(BadTraining, match="`micro_batch` and the pin `microbatches` are both"):
        batch_pins(settings, pins | pins_of(typed), 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*LEAST, "--next-sentence"], "`next_sentence` is for the task masked-lm"),
        (["--task", "causal-lm", "--data", "a"], "`model` is missing"),
        (["--task", "causal-lm", "--model", "gpt2"], "`data` is missing"),
        (
            [*LEAST, "--global-batch", "10", "--gradient-accumulation", "4"],
            "a global batch of 10 rows has no 4 equal parts for accumulation\n"
            "  help: --global-batch 12",
        ),
        ([*LEAST, "--steps", "3", "--epochs", "1"], "`steps` and `epochs` are both given"),
        (
            [*LEAST, "--warmup-steps", "3", "--warmup-fraction", "0.1"],
            "`warmup_steps` and `warmup_fraction` are both given",
        ),
        (
            [*LEAST, "--min-lr", "1e-5", "--decay", "linear"],
            "`min_learning_rate` has no effect with decay linear",
        ),
        (
            [*LEAST, "--min-lr", "1", "--lr", "0.1"],
            "`min_learning_rate` is above `learning_rate`, from which the rate falls\n"
            "  help: --min-learning-rate 0.01",
        ),
        ([*LEAST, "--length", "1"], "a row of one token has no next token"),
        (
            [*LEAST, "--warmup-steps", "50", "--steps", "20"],
            "the rate rises over 50 updates, and the run has 20\n  help: --warmup-steps 2",
        ),
        (
            [*LEAST, "--lr", "1e300"],
            "`learning_rate` is 1e+300\n  why:  AdamW changes every weight",
        ),
        (
            [*LEAST, "--lr", "1e-3", "--weight-decay", "1e3"],
            "`weight_decay` is 1000 with a rate of 0.001\n  why:  AdamW takes the share",
        ),
    ],
)
def test_settings_that_can_not_be_followed(words: list[str], text: str) -> None:
    with pytest.raises(BadTraining) as caught:
        read(*words)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--output", "{file}"], "`output` can not be written: `{file}` is no folder"),
        (["--output", "{file}/in/it"], "`{file}` is no folder\n  help: --output trained"),
        (["--tensorboard", "--output", "{folder}"], "`tensorboard` can not be written"),
        (["--metrics", "{folder}"], "can not be written: it is a folder"),
        (["--metrics", "{file}/a.jsonl"], "`{file}` is no folder\n  help: --metrics"),
        (["--metrics", "{folder}/new/a.jsonl", "--output", "{folder}/new"], None),
    ],
)
def test_what_is_written_has_a_place(words: list[str], text: str | None, tmp_path: Path) -> None:
    names = {"file": tmp_path / "runs", "folder": tmp_path}
    names["file"].write_text("a file")
    given = [word.format(**names) for word in words]
    if text is None:
        read(*LEAST, *given)
        return
    with pytest.raises(BadTraining) as caught:
        read(*LEAST, *given)
    assert text.format(**names) in str(caught.value)


@pytest.mark.parametrize("seed", ["-1", "4294967296", "1.5"])
def test_a_seed_is_one_that_every_library_takes(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(*LEAST, "--seed", seed)
    assert "is not a whole number from 0 below 2^32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("- 1\n", "has no settings by name"),
        ("taks: causal-lm\n", "has `taks`, which is no setting\n  help: task"),
        ("steps: none\n", "is not a whole number above 0"),
        ("task: causal\n", "is 'causal'\n  help: causal-lm | masked-lm"),
        ("resume: 1\n", "is 1, not true or false"),
        ("a: [\n", "can not be read"),
        ("steps: 2\nlength: 8\nsteps: 3\n", "`steps` is there twice: on lines 1 and 3"),
        ("pins: {zero: 1, zero: 3}\n", "can not be read\n  why:  `zero` is there twice"),
        ("model_settings:\n  n_layer: 2\n  n_layer: 3\n", "twice: on lines 2 and 3"),
        ("epochs: 0\n", "`epochs` of"),
        ("pins: [zero]\n", "has no pins by name\n  help: pins: {precision: bf16}"),
        ("zero: 3\n", "has `zero`, which is no setting\n  help: pins: {zero: 3}"),
        ("data_parallel: 2\n", "help: pins: {data: 2}"),
        ("devices: 2\n", "help: on the command line:  --devices 2"),
        ("train-iters: 2\n", "help: steps"),
        ("set: {n_layer: 2}\n", "help: model_settings"),
    ],
)
def test_files_that_can_not_be_followed(content: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(BadTraining) as caught:
        read(*LEAST[:4], "--data", "a", file=file)
    assert text in str(caught.value)


def test_an_empty_value_of_a_file_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("tokenizer:\nsteps: null\nlength: 16\n")
    settings, _ = read(*LEAST, file=file)
    assert (settings.tokenizer, settings.steps, settings.length) == (None, None, 16)


def test_every_setting_has_an_option_with_help_in_a_group() -> None:
    arguments = ["train", *LEAST, "--data-parallel", "2", "--pipeline", "2"]
    parsed = build_parser().parse_args(arguments)
    assert (parsed.data, parsed.data_parallel, parsed.pipeline) == (["a.jsonl"], 2, 2)


def test_the_file_in_the_document_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "train.md"
    file = tmp_path / "run.yaml"
    file.write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    settings, pins = read(file=file)
    assert (settings.task, settings.learning_rate, pins) == (
        "causal-lm",
        1e-3,
        {"precision": "bf16"},
    )
