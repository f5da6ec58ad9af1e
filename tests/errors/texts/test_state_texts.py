"""The full text of errors about Python state, by themselves and through `optimize`."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH, Classifier, small_batch
from tests.support.untouched import plain_places, refused

CASES = [
    (
        errors.StateFrozen(
            what="`t` changes in every forward, which also reads it",
            location=errors.Location("model.py", 5, "    self.t += 1"),
            note="a graph would keep the value of its capture",
            reason="the script's own model does not run: its graph does, and that knows no Python",
            help_lines=("count in a buffer",),
        ),
        """\
error[GA106]: `t` changes in every forward, which also reads it
  --> model.py:5
    5 |     self.t += 1
      |     ^^^^^^^^^^^ a graph would keep the value of its capture
  why:  the script's own model does not run: its graph does, and that knows no Python
  help: count in a buffer
  explain: graphaccel explain GA106""",
    ),
    (
        errors.DrawnOutside(
            module="Net.forward",
            generator="Python's `random`",
            location=errors.Location("model.py", 5, "    if random.random() < 0.5:"),
        ),
        """\
error[GA107]: cannot capture `Net.forward`: it draws from Python's `random`
  --> model.py:5
    5 |     if random.random() < 0.5:
      |     ^^^^^^^^^^^^^^^^^^^^^^^^^ a graph would keep the number that was drawn at capture
  why:  only torch's default generator is drawn from anew in every step, and is the same on every rank
  help: draw with torch, and choose without a branch:  x = torch.where(torch.rand((), device=x.device) < 0.5, a, b)
  help: or draw in the script, before each step, and read that in the forward:  model.drawn = random.random()
  explain: graphaccel explain GA107""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text


class Counting(nn.Module):
    """way: what the forward does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer, self.power = way, nn.Linear(WIDTH, 5), 1
        if way == "buffer":
            self.register_buffer("t", torch.zeros(()))
        else:
            self.t = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale: Any = 1.0
        if self.way in ("counter", "buffer"):
            self.t += 1
            scale = self.t
        elif self.way == "random":
            scale = random.choice([1.0, 2.0])
        elif self.way == "numpy":
            scale = float(np.random.rand())
        elif self.way == "seed":
            torch.manual_seed(0)
        elif self.way == "range":
            scale = sum(1.0 for _ in range(self.power))
        return nn.functional.cross_entropy(self.layer(x) / scale, y)


REASON = "the script's own model does not run: its graph does, and that knows no Python"
COUNTED = f"""\
error[GA106]: `t` changes in every forward, which also reads it
  --> test_state_texts.py:LINE
   LINE |             self.t += 1
      |             ^^^^^^^^^^^ a graph would keep the value of its capture
  why:  {REASON}
  help: count in a buffer:  self.register_buffer('t', torch.zeros(()))
  help: or set it from the script, before each step:  model.t = step
  explain: graphaccel explain GA106"""
DREW = """\
error[GA107]: cannot capture `Counting.forward`: it draws from GENERATOR
  --> test_state_texts.py:LINE
   LINE |             scale = CALL
      |             ^^^^^^^^UNDER a graph would keep the number that was drawn at capture
  why:  only torch's default generator is drawn from anew in every step, and is the same on every rank
  help: draw with torch, and choose without a branch:  x = torch.where(torch.rand((), device=x.device) < 0.5, a, b)
  help: or draw in the script, before each step, and read that in the forward:  model.drawn = random.random()
  explain: graphaccel explain GA107"""

SEEDED = """\
error[GA106]: `Counting.forward` seeds torch's generator
  --> test_state_texts.py:LINE
   LINE |             torch.manual_seed(0)
      |             ^^^^^^^^^^^^^^^^^^^^ a graph draws from the generator as it is
  why:  what is drawn behind this line would be other numbers than in the script's model
  help: seed in the script, before the call of the model:  torch.manual_seed(0)
  explain: graphaccel explain GA106"""


def placed(text: str, source: str) -> str:
    """The text with the number of the line of this file that reads `source`."""
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip() == source)
    return text.replace("   LINE |", f"{number:>5} |").replace("LINE", str(number))


@pytest.mark.parametrize(
    ("way", "source", "kind", "text"),
    [
        ("counter", "self.t += 1", errors.StateFrozen, COUNTED),
        (
            "random",
            "scale = random.choice([1.0, 2.0])",
            errors.DrawnOutside,
            DREW.replace("GENERATOR", "Python's `random`"),
        ),
        (
            "numpy",
            "scale = float(np.random.rand())",
            errors.DrawnOutside,
            DREW.replace("GENERATOR", "NumPy's `random`"),
        ),
        ("seed", "torch.manual_seed(0)", errors.StateFrozen, SEEDED),
    ],
)
def test_state_that_the_forward_changes(
    way: str, source: str, kind: type[errors.GraphAccelError], text: str
) -> None:
    call = source.removeprefix("scale = ")
    text = text.replace("CALL", call).replace("UNDER", "^" * len(call))
    text = placed(text, source)
    model, batch = Counting(way), small_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    drawn = torch.random.get_rng_state()
    with refused(kind, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_the_help_for_a_counter_works() -> None:
    batch, losses = small_batch(), []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Counting("buffer")
        if planned:
            graphaccel.optimize(model, devices=1)
        losses.append([model(*batch).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(set(losses[0])) == 3


def test_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphaccel.compiler.captures.MOST", 2)
    model, batch = Counting("range"), small_batch()
    graphaccel.optimize(model, devices=1)
    for model.power in (1, 2, 1, 2):
        model(*batch)
    model.power = 3
    text = """\
error[GA106]: `power` had 2 values, each with a capture of its own, and is now 3
  --> test_state_texts.py:LINE
   LINE |             scale = sum(1.0 for _ in range(self.power))
      |             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ this does something with it that a tensor can not stand for
  why:  a capture takes seconds; numbers that arithmetic with tensors reads need none
  help: hold it in a tensor, which the forward reads and the script fills:  model.power = torch.tensor(3)
  explain: graphaccel explain GA106"""
    source = "scale = sum(1.0 for _ in range(self.power))"
    with refused(errors.StateFrozen, placed(text, source), model):
        model(*batch)


WARM = SimpleNamespace(scale=1.0)


class Warming(Classifier):
    """Scales by a number that it sets where it runs outside of a capture."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x * WARM.scale, y)
        if not torch.compiler.is_exporting() and type(x) is Tensor:
            WARM.scale = 0.5
        return loss


def test_a_value_that_is_another_one_when_the_step_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WARM, "scale", 1.0)
    model, batch = Warming(), small_batch()
    graphaccel.optimize(model, devices=1)
    text = """\
error[GA106]: `tests.errors.texts.test_state_texts.WARM.scale` was 1.0 at capture and is 0.5 when the step starts
  --> test_state_texts.py:LINE
   LINE |         loss = super().forward(x * WARM.scale, y)
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the forward reads it
  why:  a graph can not follow a value that changes between two looks at it
  help: set it before the call of the model, and leave it until the call returns
  explain: graphaccel explain GA106"""
    with refused(
        errors.StateFrozen, placed(text, "loss = super().forward(x * WARM.scale, y)"), model
    ):
        model(*batch)


def test_a_submodule_that_is_replaced() -> None:
    model, batch = Counting("none"), small_batch()
    model.layer = nn.Sequential(model.layer, nn.ReLU())
    graphaccel.optimize(model, devices=1)
    model(*batch)
    model.layer[1] = nn.Tanh()
    text = """\
error[GA106]: submodule `layer.1` is another one than when the step was captured
  why:  the plan and the optimizer hold parts of the model as it was
  help: replace modules before graphaccel.optimize(model, optimizer)
  explain: graphaccel explain GA106"""
    with refused(errors.StateFrozen, text, model):
        model(*batch)


def test_autocast_around_a_step() -> None:
    model, batch = Counting("none"), small_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    text = """\
error[GA106]: torch.autocast in bfloat16 is active around a step that is planned in float32
  --> test_state_texts.py:LINE
   LINE |         model(*batch)  # under autocast
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^ the model is called here
  why:  the plan decides in which precision the step computes, and what memory it takes
  help: say it to the plan instead:  graphaccel.optimize(model, optimizer, precision="bf16")
  help: or call the model outside of torch.autocast
  explain: graphaccel explain GA106"""
    text = placed(text, "model(*batch)  # under autocast")
    with refused(errors.StateFrozen, text, model), torch.autocast("cpu", torch.bfloat16):
        model(*batch)  # under autocast


def test_autocast_that_the_plan_says_changes_nothing() -> None:
    batch, losses = small_batch(), []
    for active in (False, True):
        torch.manual_seed(0)
        model = Counting("none")
        graphaccel.optimize(model, devices=1, precision="bf16")
        with torch.autocast("cpu", torch.bfloat16, enabled=active):
            losses.append(model(*batch).item())
    assert losses[0] == losses[1]


def test_a_forward_that_gives_another_result_each_time() -> None:
    stream = io.BytesIO(bytes(range(1, 99)))

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        @property
        def factor(self) -> int:
            return stream.read(1)[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.factor).square().mean()

    model = graphaccel.optimize(Counting(), devices=1)
    with pytest.raises(errors.StateFrozen) as caught:
        model(torch.ones(2, 2))
    said = str(caught.value).splitlines()
    assert said[0].startswith(
        "error[GA106]: two forwards on one batch, with one random state, differ: "
    )
    assert said[1:] == [
        "  why:  a captured graph gives one result for the same inputs, and would train on what was "
        "so at its capture",
        "  help: pass what changes from call to call to the forward, as an argument",
        "  explain: graphaccel explain GA106",
    ]


class Started(nn.Module):
    """A layer that the first batch scales."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ready = nn.Linear(WIDTH, 5), False
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if not self.ready:
            self.scale.copy_(x.abs().mean(0))
            self.ready = True
        return nn.functional.cross_entropy(self.layer(x * self.scale), labels)


STARTED = """\
error[GA106]: `ready` makes the first forward another one than those after it
  --> test_state_texts.py:LINE
   LINE |             self.ready = True
      |             ^^^^^^^^^^^^^^^^^ written by the forward that reads it
  why:  every step runs the same graph
  help: run one forward before graphaccel.optimize:  CALL
  explain: graphaccel explain GA106"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a frame knows no columns")
def test_the_help_has_the_call_as_the_script_writes_it() -> None:
    rows, y = small_batch()

    def call(network: nn.Module) -> None:
        network(
            rows,  # of one batch
            labels=y,
        ).backward()

    network = Started()
    graphaccel.optimize(network, devices=1)
    with pytest.raises(errors.StateFrozen) as caught:
        call(network)
    wanted = placed(STARTED, "self.ready = True").replace("CALL", "network(rows, labels=y)")
    assert plain_places(str(caught.value)) == wanted
    network = Started()
    call(network)
    graphaccel.optimize(network, devices=1)
    call(network)  # as the help says


@pytest.mark.parametrize("form", ["model(*batch)", "model(**batch)"])
def test_the_help_has_the_form_of_an_example_batch(form: str) -> None:
    rows, labels = small_batch()
    batch: Any = {"x": rows, "labels": labels} if "**" in form else (rows, labels)
    model, wanted = Started(), placed(STARTED, "self.ready = True").replace("CALL", form)
    with refused(errors.StateFrozen, wanted, model):
        graphaccel.optimize(model, devices=1, example_batch=batch)
