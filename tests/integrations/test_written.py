"""Errors under a Trainer name what its script can type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphaccel.errors import GraphMisuse, OutputDropped
from graphaccel.integrations.transformers import Trainer
from graphaccel.integrations.written import ACCELERATOR, as_written
from tests.integrations.test_trainer import Lines, arguments, gpt2

pytestmark = pytest.mark.filterwarnings("ignore")


class Penalised(Trainer):
    """Its loss reads an output that a plan does not keep."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        result = model(**inputs)
        return result.loss + 1e-3 * result.logits.square().mean()


def penalised(folder: Path, **settings: Any) -> Penalised:
    changed = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no"}
    given = arguments(str(folder), **changed, max_steps=1)
    return Penalised(gpt2(), given, train_dataset=Lines(16, seed=1), optimize=settings)


def test_a_line_to_paste_is_an_argument_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(OutputDropped) as caught:
        penalised(tmp_path).train()
    lines = [line for line in str(caught.value).split("\n") if "Trainer(" in line]
    assert "graphaccel.optimize" not in str(caught.value)
    assert lines == [
        '  help: keep it:  Trainer(model=model, ..., optimize={"outputs": "all"})',
        "  help: or, if the script computes its loss from it:  "
        'Trainer(model=model, ..., optimize={"loss_fn": "outside"})',
    ]
    penalised(tmp_path, loss_fn="outside").train()


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("graphaccel.optimize(model, optimizer, zero=0, tensor=1)", '"zero": 0, "tensor": 1'),
        ("graphaccel.optimize(model, optimizer, batch_dims={'x': 1})", '"batch_dims": {"x": 1}'),
    ],
)
def test_arguments_are_those_of_the_line(typed: str, instead: str) -> None:
    with pytest.raises(GraphMisuse) as caught, as_written(ACCELERATOR):
        raise GraphMisuse(what="a sentence", help_line=f"try:  {typed}")
    assert f"  help: try:  Accelerator(optimize={{{instead}}})\n" in str(caught.value)


def test_lines_for_a_loop_of_ones_own_are_left_out() -> None:
    line = "graphaccel.optimize(model, optimizer, loss_fn=loss_fn)"
    with pytest.raises(GraphMisuse) as caught, as_written(ACCELERATOR):
        raise GraphMisuse(what="a sentence", help_line=f"pass a function:  {line}")
    assert "help" not in str(caught.value)
