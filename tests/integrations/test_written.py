"""Errors under a Trainer name what its script can type."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from graphaccel.errors import GraphMisuse, OutputDropped
from graphaccel.integrations.accelerate import Accelerator
from graphaccel.integrations.transformers import Trainer
from graphaccel.integrations.written import ACCELERATOR, LIGHTNING, TRAINER, Form, as_written
from tests.integrations.test_trainer import Lines, arguments, gpt2

pytestmark = pytest.mark.filterwarnings("ignore")

LOCAL = "graphaccel.optimize(model, optimizer, batch='local')"


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


@pytest.mark.parametrize(
    ("form", "text", "typed"),
    [
        (TRAINER, "pass a function:  graphaccel.optimize(model, optimizer, loss_fn=loss_fn)", None),
        (TRAINER, "tie weights before:  graphaccel.optimize(model, optimizer)",
         "tie weights before:  Trainer(model=model, ...)"),
        (ACCELERATOR, LOCAL, None),
        (ACCELERATOR, f"in a loop of your own:  {LOCAL}", f"in a loop of your own:  {LOCAL}"),
        (ACCELERATOR, "optimize(model, optimizer)  # each",
         "accelerator.prepare(model, optimizer)  # each"),
        (LIGHTNING, "graphaccel.optimize(model, optimizer, loss_fn=loss_fn)",
         "Trainer(strategy=PlannedStrategy(loss_fn=loss_fn), devices=1)"),
        (LIGHTNING, "graphaccel.optimize(model, optimizer, zero=0, on_nonfinite='skip')",
         'Trainer(strategy=PlannedStrategy(zero=0, on_nonfinite="skip"), devices=1)'),
    ],
)  # fmt: skip
def test_a_line_is_that_of_the_library_or_left_out(
    form: Form, text: str, typed: str | None
) -> None:
    with pytest.raises(GraphMisuse) as caught, as_written(form):
        raise GraphMisuse(what="a sentence", help_line=text)
    found = [line for line in str(caught.value).split("\n") if line.startswith("  help: ")]
    assert found == ([] if typed is None else [f"  help: {typed}"])


def _in_a_loop(**settings: Any) -> torch.Tensor:
    """The loss of a script's own, from an output that a plan does not keep."""
    accelerator = Accelerator(cpu=True, optimize=settings)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.stack([row["input_ids"] for row in (Lines(4, seed=1)[i] for i in range(4))])
    result = model(input_ids=rows, labels=rows)
    loss = result.loss + 1e-3 * result.logits.square().mean()
    accelerator.backward(loss)
    optimizer.step()
    return loss


def test_a_line_to_paste_is_an_argument_of_the_accelerator() -> None:
    with pytest.raises(OutputDropped) as caught:
        _in_a_loop()
    assert "graphaccel.optimize" not in str(caught.value)
    lines = [line for line in str(caught.value).split("\n") if "Accelerator(" in line]
    assert lines == [
        '  help: keep it:  Accelerator(optimize={"outputs": "all"})',
        "  help: or, if the script computes its loss from it:  "
        'Accelerator(optimize={"loss_fn": "outside"})',
    ]
    assert torch.isfinite(_in_a_loop(loss_fn="outside"))


def test_without_the_library_a_line_is_optimize_again() -> None:
    accelerator = Accelerator(cpu=True)
    error = OutputDropped(name="logits")
    assert "Accelerator(" in str(error)
    del accelerator
    gc.collect()
    assert "graphaccel.optimize(model, optimizer, outputs=" in str(OutputDropped(name="logits"))
