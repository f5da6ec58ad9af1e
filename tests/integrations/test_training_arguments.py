"""Pins from TrainingArguments, and the text of what contradicts a plan."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import graphaccel
from graphaccel.errors import GraphMisuse, NotAlone
from graphaccel.integrations.accelerate import Accelerator
from graphaccel.integrations.lightning import PlannedStrategy
from graphaccel.integrations.training_arguments import pins_of
from graphaccel.integrations.transformers import Trainer
from tests.integrations.test_trainer import Lines, arguments, gpt2

pytestmark = pytest.mark.filterwarnings("ignore")


def given(folder: Path, **changed: Any) -> TrainingArguments:
    return arguments(str(folder), **changed)


def test_the_precision_is_that_of_the_plan(tmp_path: Path) -> None:
    args = given(tmp_path, bf16=True)
    assert args.mixed_precision == "bf16"
    assert pins_of(args, {"tensor": 2}) == {"tensor": 2, "precision": "bf16"}
    assert args.mixed_precision == "no"
    assert pins_of(given(tmp_path), {"tensor": 2}) == {"tensor": 2}


def test_the_precision_of_accelerate_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = given(tmp_path)
    assert args.mixed_precision == "bf16"
    for _ in range(2):  # Trainers of the same arguments
        assert pins_of(args, {}) == {"precision": "bf16"}
    with pytest.raises(GraphMisuse, match="accelerate launch --mixed_precision bf16, but"):
        pins_of(args, {"precision": "fp16"})


def test_another_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphMisuse) as caught:
        pins_of(given(tmp_path, bf16=True), {"precision": "fp16"})
    assert str(caught.value) == (
        "error[GA407]: TrainingArguments(bf16=True), but optimize={'precision': 'fp16'}\n"
        "  help: leave one out, or pin the same:  optimize={'precision': 'bf16'}\n"
        "  explain: graphaccel explain GA407"
    )


@pytest.mark.parametrize(
    ("changed", "instead"),
    [
        ({"torch_compile": True}, 'optimize={"compile": "inductor"}'),
        ({"auto_find_batch_size": True}, 'optimize={"microbatches": 4}'),
        ({"bf16_full_eval": True}, "bf16=True"),
    ],
)
def test_what_the_plan_decides_is_refused(
    tmp_path: Path, changed: dict[str, Any], instead: str
) -> None:
    (name,) = changed
    with pytest.raises(GraphMisuse) as caught:
        pins_of(given(tmp_path, **changed), {})
    assert str(caught.value) == (
        f"error[GA407]: TrainingArguments({name}=...) asks for what the plan decides\n"
        f"  help: leave it out; the plan's own is:  {instead}\n"
        "  explain: graphaccel explain GA407"
    )


@pytest.mark.parametrize("changed", [{"neftune_noise_alpha": 5.0}, {"debug": "underflow_overflow"}])
def test_what_hangs_hooks_on_modules_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(GraphMisuse) as caught:
        pins_of(given(tmp_path, **changed), {})
    first, second, _ = str(caught.value).splitlines()
    assert first.startswith(f"error[GA407]: TrainingArguments({name}=...) hangs hooks on modules")
    assert second.startswith("  help: leave it out; ")


@pytest.mark.parametrize(
    ("variable", "value", "option"),
    [
        ("ACCELERATE_USE_FSDP", "true", "--use_fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "--use_deepspeed"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "--use_parallelism_config"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend"),
    ],
)
def test_what_accelerate_launch_sets_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, option: str
) -> None:
    """Accelerate would leave it aside in a job that it takes for one process."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(GraphMisuse) as caught:
        Accelerator()
    first, second, _ = str(caught.value).splitlines()
    assert f"as `accelerate launch {option}` sets it" in first
    assert second.startswith("  help: leave it out")
    monkeypatch.setenv(variable, "NO" if value == "INDUCTOR" else "false")
    assert Accelerator().num_processes == 1


def test_rows_of_each_rank_are_refused(tmp_path: Path) -> None:
    """All ranks read the same batches here: their rows would be counted twice."""
    local = {"batch": "local"}
    with pytest.raises(GraphMisuse, match="every rank reads the same batches"):
        Trainer(model=gpt2(), args=given(tmp_path), train_dataset=Lines(8, 1), optimize=local)
    with pytest.raises(GraphMisuse, match="every rank reads the same batches"):
        Accelerator(optimize=local)
    with pytest.raises(GraphMisuse, match="every rank reads the same batches"):
        PlannedStrategy(**local)


def test_a_model_that_is_optimized_already(tmp_path: Path) -> None:
    model = gpt2()
    graphaccel.optimize(model, devices=1)
    trainer = Trainer(
        model=model, args=given(tmp_path), train_dataset=Lines(16, 1), eval_dataset=Lines(8, 2)
    )
    with pytest.raises(GraphMisuse) as caught:
        trainer.create_optimizer()
    assert str(caught.value) == (
        "error[GA407]: the model was optimized before Trainer had made its optimizer\n"
        "  help: give Trainer the plain model:  "
        'Trainer(model=model, ..., optimize={"devices": 2})\n'
        "  explain: graphaccel explain GA407"
    )


def test_what_the_launcher_says_is_checked_before_arguments_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(NotAlone):
        runpy.run_module("graphaccel.integrations.transformers")


def test_a_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(
        model=gpt2(), args=given(tmp_path, eval_strategy="no", load_best_model_at_end=False),
        train_dataset=Lines(0, seed=0), optimize={"devices": 1},
    )  # fmt: skip
    with pytest.raises(GraphMisuse, match="train_dataset has no rows"):
        trainer.train()
