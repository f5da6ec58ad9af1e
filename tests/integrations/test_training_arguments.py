"""Pins from TrainingArguments, and the text of what contradicts a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import graphaccel
from graphaccel.errors import GraphMisuse
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
