"""The first step under a plan against the captured graph on one device; wrong passes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import graphaccel
from graphaccel.errors import CaptureDiffers, PlanDiffers
from graphaccel.passes import adapters
from graphaccel.passes.microbatch import exact_microbatch
from tests.proof.models import Net, batch, plain_step, seeded
from tests.support.inside import captures_in

aten = torch.ops.aten


def planned(model: nn.Module, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under a plan; one that is a `Net` need not be captured again."""
    model, optimizer = graphaccel.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1, **settings
    )
    step, _ = plain_step()
    captures_in(model).steps[(batch().signature(), True)] = step
    return model, optimizer


def test_a_right_plan_passes_and_says_so(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHACCEL_QUIET", "0")
    model, _ = planned(seeded(Net), microbatches=2)
    for _ in range(2):
        model(*batch().leaves).backward()
    said = [line for line in capsys.readouterr().err.splitlines() if ": proved" in line]
    assert len(said) == 2
    assert "loss and 6 gradients equal eager's (exactly)" in said[0]
    assert "loss and 6 gradients of the plan's step equal one device's (" in said[1]


@pytest.mark.parametrize("fault", ["mean of means", "lost part", "scaled"])
def test_a_wrong_pass_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "mean of means":
        # A loss that divides by the count of the part is scaled as if it were a sum.
        monkeypatch.setattr(exact_microbatch, "is_quantity", lambda *_: False)
    elif fault == "lost part":
        whole = adapters.accumulate_gradients

        def last_alone(program: Any, *rest: Any) -> Any:
            made = whole(program, *rest)
            made.backwards[(False, True)] = made.backwards[(True, False)]
            return made

        monkeypatch.setattr(adapters, "accumulate_gradients", last_alone)
    else:
        split = adapters.split_phases
        monkeypatch.setattr(adapters, "split_phases", lambda *a: _scaled(split(*a)))
    model, _ = planned(seeded(Net), microbatches=2)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # it does not pass the second time either
        with pytest.raises(PlanDiffers) as caught:
            model(*batch().leaves)
    assert caught.value.values
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def _scaled(programs: Any) -> Any:
    """Each backward with its first gradient times 1.01."""
    for program in programs:
        for graph in program.backwards.values():
            _scale_first(graph.graph, program.backward_outputs)
            graph.recompile()
    return programs


def _scale_first(graph: fx.Graph, outputs: Any) -> None:
    results = graph.output_node()
    values = list(results.args[0])
    place = next(i for i, o in enumerate(outputs) if o.kind == "gradient")
    with graph.inserting_before(results):
        made = graph.call_function(aten.mul.Tensor, (values[place], 1.01))
    made.meta = dict(values[place].meta)
    values[place] = made
    results.args = (values,)


def test_the_model_is_as_before_after_a_capture_that_differs() -> None:
    model = seeded(lambda: Net(lambda _net, x: F.dropout(x, 0.5)))
    kind = type(model)
    optimized, optimizer = planned(model)
    assert optimized is model
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CaptureDiffers):
        model(*batch().leaves)
    assert type(model) is kind
    assert not hasattr(model, "graphaccel")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not optimizer.state
    model(*batch().leaves).backward()  # plain again
    model.middle = lambda _net, x: x
    model, optimizer = planned(model)
    model(*batch().leaves).backward()
    optimizer.step()


def test_off_compares_nothing() -> None:
    model, _ = planned(seeded(lambda: Net(lambda _net, x: F.dropout(x, 0.5))), check="off")
    wrong: Tensor = model(*batch().leaves)
    assert wrong.item() == seeded(Net)(*batch().leaves).item()


def test_another_word_is_refused() -> None:
    with pytest.raises(graphaccel.errors.BadPin) as caught:
        planned(seeded(Net), check="always")
    assert "there is no such check" in str(caught.value)
