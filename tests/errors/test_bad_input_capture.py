"""Models that have no graph, through `optimize`: class, full text, and nothing half-changed."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import graphaccel
from graphaccel import errors
from tests.support.small import WIDTH, Classifier, small_batch, used_optimizer
from tests.support.untouched import refused

EXPLAIN = "  help: to see torch's own report:  GRAPHACCEL_TRACEBACK=full python train.py"


class Router(nn.Module):
    """Branches on a value, once its layer has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.layer(x).softmax(-1)
        if gate.max() > 0.9:
            return x
        return gate


class ToNumpy(Router):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.from_numpy(x.detach().numpy())


class Masked(Router):
    def forward(self, x: Tensor) -> Tensor:
        kept = x[x > 0]
        return self.layer(x) + kept.sum()


class Experts(Router):
    """Rows go to experts by a loop over those; `weighs`: as the help of its error says."""

    def __init__(self, *, weighs: bool = False) -> None:
        super().__init__()
        self.weighs = weighs
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.layer(x)[:, :3].softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.weighs:
                out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
            else:
                rows, places = torch.where(chosen == i)
                out[rows] += weights[rows, places, None] * expert(x[rows])
        return out


class Raises(Router):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("  the rows\n are odd")


class Asserts(Router):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any(), "no number"
        return self.layer(x)


def _line(model: type[nn.Module], offset: int) -> int:
    return model.forward.__code__.co_firstlineno + offset


def _check(inner: nn.Module, kind: type[errors.GraphAccelError], text: str) -> None:
    model, batch = Classifier(inner), small_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(kind, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=batch)


def test_an_assertion_on_values() -> None:
    number = _line(Asserts, 1)
    text = f"""\
error[GA101]: cannot capture `Asserts.forward`: it branches on the value of a tensor
  --> test_bad_input_capture.py:{number}
{number:>5} |         assert not torch.isnan(x).any(), "no number"
      |                ^^^^^^^^^^^^^^^^^^^^^^^^ this becomes a Python value, so the graph would depend on the data
  why:  graphaccel needs one graph for every batch
  help: make the check outside of the model, or skip assertions:  python -O train.py
  explain: graphaccel explain GA101"""
    _check(Asserts(), errors.TensorBranch, text)


def test_a_branch_is_underlined_in_the_users_own_line(capfd: pytest.CaptureFixture[str]) -> None:
    number = _line(Router, 2)
    text = f"""\
error[GA101]: cannot capture `Router.forward`: it branches on the value of a tensor
  --> test_bad_input_capture.py:{number}
{number:>5} |         if gate.max() > 0.9:
      |            ^^^^^^^^^^^^^^^^ this becomes a Python value, so the graph would depend on the data
  why:  graphaccel needs one graph for every batch
  help: make it branch-free:  x = torch.where(condition, a, b)
  explain: graphaccel explain GA101"""
    _check(Router(), errors.TensorBranch, text)
    assert capfd.readouterr() == ("", "")


def test_a_call_without_a_graph_is_underlined() -> None:
    number = _line(ToNumpy, 1)
    text = f"""\
error[GA102]: cannot capture `ToNumpy.forward`: this has no graph
  --> test_bad_input_capture.py:{number}
{number:>5} |         return self.layer(x) * torch.from_numpy(x.detach().numpy())
      |                                                 ^^^^^^^^^^^^^^^^^^
  why:  .numpy() is not supported for tensor subclasses.
{EXPLAIN}
  explain: graphaccel explain GA102"""
    _check(ToNumpy(), errors.CaptureRefused, text)


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    number = _line(Masked, 1)
    text = f"""\
error[GA102]: cannot capture `Masked.forward`: this has no graph
  --> test_bad_input_capture.py:{number}
{number:>5} |         kept = x[x > 0]
      |         ^^^^^^^^^^^^^^^
  why:  the shape of its result depends on the values of a tensor; torch.where and masked sums keep the shape
  help: keep all rows, and weigh them:  loss = (losses * mask).sum() / mask.sum()
  explain: graphaccel explain GA102"""
    _check(Masked(), errors.CaptureRefused, text)


def test_a_loop_over_experts_is_refused_with_its_line_and_one_that_works() -> None:
    number = _line(Experts, 7)
    text = f"""\
error[GA102]: cannot capture `Experts.forward`: this has no graph
  --> test_bad_input_capture.py:{number}
{number:>5} |                 rows, places = torch.where(chosen == i)
      |                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why:  the shape of its result depends on the values of a tensor; torch.where and masked sums keep the shape
  help: keep all rows, and weigh them:  out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
  explain: graphaccel explain GA102"""
    _check(Experts(), errors.CaptureRefused, text)
    loop, weighed = Classifier(Experts()), Classifier(Experts(weighs=True))
    weighed.load_state_dict(loop.state_dict())
    wanted = loop(*small_batch())
    graphaccel.optimize(weighed, devices=1)
    torch.testing.assert_close(weighed(*small_batch()), wanted)


@pytest.mark.parametrize("early", [True, False])
def test_what_the_forward_raises_in_eager_mode_is_raised(early: bool) -> None:
    model, batch = Classifier(Raises()), small_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with pytest.raises(ValueError, match=r"the rows\n are odd"):
        graphaccel.optimize(model, example_batch=batch if early else None)(*batch)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_batch_that_does_not_fit_raises_what_torch_says() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0))
    model, _ = graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.ones(2, WIDTH + 1))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()
    model(torch.ones(2, WIDTH)).sum().backward()


def test_a_mode_that_counts_operations() -> None:
    model, batch = Classifier(), small_batch()
    model, _ = graphaccel.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), devices=1)
    with FlopCounterMode(display=False), pytest.raises(errors.GradientRuleRefused) as caught:
        model(*batch)
    assert "`FlopCounterMode`, which is active around the call of the model" in str(caught.value)


class Doubling(TorchFunctionMode):
    """Changes what a function of torch returns."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        return 2 * value if func is F.linear else value


def test_a_mode_of_functions_around_a_later_step() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1)
    with torch.device("cpu"):  # chooses a device, and leaves values alone
        model(*batch)
    number = test_a_mode_of_functions_around_a_later_step.__code__.co_firstlineno + 16
    text = f"""\
error[GA106]: `Doubling`, a TorchFunctionMode, is active around a step
  --> test_bad_input_capture.py:{number}
{number:>5} |         model(*batch)  # in it
      |         ^^^^^^^^^^^^^^^^^^^^^^ the model is called here
  why:  the step runs a graph of ops, in which the functions that it would see are not called any more
  help: call the model outside of it, and do in its forward what the mode does
  explain: graphaccel explain GA106"""
    with refused(errors.StateFrozen, text, model, optimizer), Doubling():
        model(*batch)  # in it


def test_a_refused_first_batch_leaves_the_optimizer_state() -> None:
    model, batch = Classifier(), small_batch()
    optimizer = used_optimizer(model, batch)
    model.inner = Router()
    optimizer.add_param_group({"params": list(model.inner.parameters())})
    graphaccel.optimize(model, optimizer)
    number = _line(Router, 2)
    text = f"""\
error[GA101]: cannot capture `Router.forward`: it branches on the value of a tensor
  --> test_bad_input_capture.py:{number}
{number:>5} |         if gate.max() > 0.9:
      |            ^^^^^^^^^^^^^^^^ this becomes a Python value, so the graph would depend on the data
  why:  graphaccel needs one graph for every batch
  help: make it branch-free:  x = torch.where(condition, a, b)
  explain: graphaccel explain GA101"""
    with refused(errors.TensorBranch, text, model, optimizer):
        model(*batch)
    assert model.graphaccel.plan is None


@pytest.mark.parametrize(
    ("pins", "asked"),
    [
        ({"outputs": "loss"}, "outputs='loss'"),
        ({"microbatches": 2}, "microbatches=2"),
        ({"pipeline": 2}, "pipeline=2"),
    ],
)
def test_a_model_without_a_loss(pins: dict[str, int], asked: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    text = f"""\
error[GA103]: {asked} needs the loss in the graph, and the model returns none
  why:  backward of one microbatch runs between the forwards of others, before the script could compute a loss
  help: return the loss from the model: a scalar, or an output with a field `loss`
  help: or pass a function of the model's output and the targets:  graphaccel.optimize(model, optimizer, loss_fn=loss_fn)
  explain: graphaccel explain GA103"""
    with refused(errors.NoLoss, text, model, optimizer):
        graphaccel.optimize(model, optimizer, example_batch=small_batch()[:1], **pins)
