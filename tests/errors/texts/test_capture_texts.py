"""The full text of every error about capture."""

from __future__ import annotations

import pytest

from graphaccel import errors

CASES = [
    (
        errors.TensorBranch(
            module="Router.forward",
            location=errors.Location("model.py", 57, "        if gate.max() > 0.9:", 11, 27),
            others=(errors.Location("model.py", 91), errors.Location("data.py", 20)),
        ),
        """\
error[GA101]: cannot capture `Router.forward`: it branches on the value of a tensor
  --> model.py:57
   57 |         if gate.max() > 0.9:
      |            ^^^^^^^^^^^^^^^^ this becomes a Python value, so the graph would depend on the data
  why:  graphaccel needs one graph for every batch
  help: make it branch-free:  x = torch.where(condition, a, b)
  2 more places like this: model.py:91, data.py:20
  explain: graphaccel explain GA101""",
    ),
    (
        errors.CaptureRefused(
            module="encoder.noise",
            location=errors.Location("model.py", 12, "x = draw(3)"),
            reason="draw() returned a NumPy array",
        ),
        """\
error[GA102]: cannot capture `encoder.noise`: this has no graph
  --> model.py:12
   12 | x = draw(3)
      | ^^^^^^^^^^^
  why:  draw() returned a NumPy array
  help: to see torch's own report:  GRAPHACCEL_TRACEBACK=full python train.py
  explain: graphaccel explain GA102""",
    ),
    (
        errors.NoLoss(asked="pipeline=2"),
        """\
error[GA103]: pipeline=2 needs the loss in the graph, and the model returns none
  why:  backward of one microbatch runs between the forwards of others, before the script could compute a loss
  help: return the loss from the model: a scalar, or an output with a field `loss`
  help: or pass a function of the model's output and the targets:  graphaccel.optimize(model, optimizer, loss_fn=loss_fn)
  explain: graphaccel explain GA103""",
    ),
    (
        errors.GradientRuleRefused(
            module="Net.forward",
            rule="a write to `.data`",
            reason="gradients would not know of the new value",
            line="compute it as a new tensor",
        ),
        """\
error[GA104]: cannot capture `Net.forward`: a write to `.data` can not be part of the graph
  why:  gradients would not know of the new value
  help: compute it as a new tensor
  explain: graphaccel explain GA104""",
    ),
    (
        errors.UnregisteredWeight(
            module="Net.forward",
            name="a weight of shape [6, 6]",
            line="self.head = head    # in __init__",
        ),
        """\
error[GA105]: cannot capture `Net.forward`: a weight of shape [6, 6] requires a gradient and is none of the model's parameters
  why:  it is not in model.parameters(), so no plan could hold, split or update it
  help: register it:  self.head = head    # in __init__
  help: or, if it is not to be trained, turn its gradient off:  weight.requires_grad_(False)
  explain: graphaccel explain GA105""",
    ),
    (
        errors.CaptureDiffers(
            values=(
                "gradient of `a.weight`: off by 2.0e+00",
                "gradient of `a.bias`: graph has none",
            ),
            rows=2,
            node="mm_2",
            op="aten.mm.default",
            phase="backward",
            module="b",
            location=errors.Location("model.py", 31, "        return self.c(self.b(x))"),
        ),
        """\
error[GA108]: the captured graph does not compute what the model computes
  --> model.py:31
   31 |         return self.c(self.b(x))
      |         ^^^^^^^^^^^^^^^^^^^^^^^^ the first value that differs is made here
  gradient of `a.weight`: off by 2.0e+00
  gradient of `a.bias`: graph has none
  the first value that differs: mm_2 (aten.mm.default, backward) in `b`
  why:  on 2 rows of the first batch plain autograd gives other values, so that training would go wrong
  help: see where it begins:  import graphaccel.debug; graphaccel.debug.bisect(model, batch)
  explain: graphaccel explain GA108""",
    ),
    (
        errors.PlanDiffers(
            plan="data 2 · 4 microbatches",
            values=("loss: off by 1.0e-01", "gradient of `a.weight`: no rank has one"),
        ),
        """\
error[GA109]: the first step under the plan does not give what one device gives: data 2 · 4 microbatches
  loss: off by 1.0e-01
  gradient of `a.weight`: no rank has one
  why:  the captured graph, run whole on one device, has another loss or other gradients
  help: keep the batch on one device:  graphaccel.optimize(model, optimizer, devices=1)
  explain: graphaccel explain GA109""",
    ),
    (
        errors.UpdateDiffers(
            optimizer="LARS",
            values=("the new value of `a.weight` is off by 2.2e-01",),
            declared=True,
            location=errors.Location("train.py", 9, "    optimizer.step()"),
        ),
        """\
error[GA110]: the first update of LARS under the plan is not that of one device
  --> train.py:9
    9 |     optimizer.step()
      |     ^^^^^^^^^^^^^^^^
  the new value of `a.weight` is off by 2.2e-01
  why:  a copy of it that stepped the same parameters whole changes them otherwise
  help: leave out:  LARS.graphaccel_elementwise = True
  help: keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1
  help: the weights have had this update: start anew, or from a checkpoint
  explain: graphaccel explain GA110""",
    ),
    (
        errors.PlanDiffers(
            plan="data 2 · float16",
            values=("loss: infinite or NaN in float16, finite in float32",),
            overflow="float16",
            location=errors.Location("model.py", 5, "    h = self.a(x) * 1e5"),
        ),
        """\
error[GA109]: the forward overflows in float16, and not in float32: data 2 · float16
  --> model.py:5
    5 |     h = self.a(x) * 1e5
      |     ^^^^^^^^^^^^^^^^^^^ the first value that is infinite or NaN
  loss: infinite or NaN in float16, finite in float32
  why:  the loss scale keeps gradients in range, not what the forward computes
  help: compute in a wider dtype:  graphaccel.optimize(model, optimizer, precision="bf16")
  explain: graphaccel explain GA109""",
    ),
]


@pytest.mark.parametrize(("error", "text"), CASES, ids=lambda value: getattr(value, "code", ""))
def test_text(error: errors.GraphAccelError, text: str) -> None:
    assert str(error) == text
