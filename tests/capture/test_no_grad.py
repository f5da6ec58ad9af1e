"""What a model computes without gradients is a constant to them, as in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.errors import CaptureRefused

WIDTH = 8


class Taught(nn.Module):
    """Its own teacher, under no_grad, by a decorator, and in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def decorated(self, x: Tensor) -> Tensor:
        return self.second(x).softmax(-1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            soft = self.first(y).tanh()
            with torch.enable_grad():
                inner = self.second(soft)
        with torch.inference_mode():
            hard = self.second(hidden).sigmoid()
        kept = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        weights = self.second(hidden)
        torch.set_grad_enabled(kept)
        target = soft + inner + hard.clone() + self.decorated(hidden)
        return F.mse_loss(self.second(hidden) * weights, target)


class Averaged(nn.Module):
    """A running average of activations, and a weight divided by its norm as power iteration has it:
    both change buffers without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return F.mse_loss(hidden - self.mean, y)


class Codes(nn.Module):
    """Buffers that get activations through `.data`, and are read afterwards: eager mode gives them
    no gradient. Codes of a VQ-VAE, whose first batch sets them, are written so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("center", torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(2, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        mean = hidden.mean(0)
        self.center.data.mul_(0.9).add_(mean, alpha=0.1)
        before = hidden - self.center
        self.center.data.mul_(0.5).add_(mean * mean)
        self.table.data[0].copy_(mean)
        self.table.detach()[1] = 2 * mean
        output = self.second(before - self.center) * self.table.sum(0)
        return F.mse_loss(output, y)


@pytest.mark.parametrize("kind", [Taught, Averaged, Codes])
def test_gradients_are_those_of_eager_mode(kind: type[nn.Module]) -> None:
    torch.manual_seed(2)
    plain = kind().double()
    planned = copy.deepcopy(plain)
    graphaccel.optimize(planned, devices=1)
    batch = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    for model in (plain, planned):
        model(*batch).backward()
    for (name, true), got in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert true.grad is not None
        torch.testing.assert_close(got.grad, true.grad, rtol=1e-12, atol=1e-14, msg=name)
    for true, got in zip(plain.buffers(), planned.buffers(), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-14)


SAME = {
    "to": lambda h: h.to(h.dtype),
    "cpu": lambda h: h.cpu(),
    "double": lambda h: h.double(),
    "type_as": lambda h: h.type_as(h),
    "dropout": lambda h: F.dropout(h, 0.5, training=False),
    "flatten": lambda h: h.flatten(1),
    "real": torch.real,
    "resolve_conj": lambda h: h.resolve_conj(),
    "at_least": torch.atleast_2d,
    "broadcast": lambda h: torch.broadcast_tensors(h, h)[0],
    "positive": lambda h: +h,
}
"""Calls that return the tensor they are given."""


class Reused(nn.Module):
    """Reads an activation after a block without gradients in which such a call returned it."""

    def __init__(self, same: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.same = same

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            returned = SAME[self.same](hidden)
            scale = returned.abs().mean() + SAME[self.same](hidden.sin()).cos().mean()
        return F.mse_loss(self.second(hidden) * scale + returned, y)


@pytest.mark.parametrize("same", SAME)
def test_an_op_that_returns_its_argument_detaches_nothing(same: str) -> None:
    torch.manual_seed(2)
    plain = Reused(same).double()
    x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    assert SAME[same](x) is x
    plain(x, y).backward()
    planned = copy.deepcopy(plain)
    planned.zero_grad()
    graphaccel.optimize(planned, devices=1, check="off")
    planned(x, y).backward()
    for (name, true), got in zip(plain.named_parameters(), planned.parameters(), strict=True):
        assert true.grad is not None
        torch.testing.assert_close(got.grad, true.grad, rtol=1e-12, atol=1e-14, msg=name)


def test_inference_mode_is_itself_again_afterwards() -> None:
    capture(Taught(), flatten_call(tuple(torch.randn(2, 4, WIDTH)), {}))
    with torch.inference_mode():
        assert torch.ones(1).is_inference()


def test_what_needs_no_gradient_is_left_as_it_was() -> None:
    """A table of angles, as in rotary embeddings."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rates", torch.ones(WIDTH))
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                table = (self.rates * 2).cos()
            return (self.first(x) * table).sum()

    step = capture(Turned(), flatten_call((torch.randn(4, WIDTH),), {}))
    assert "detach" not in step.text()


class Clamped(nn.Module):
    """Changes a value that has a gradient behind the gradient's back, or a weight; or as the help
    says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "weight":
            self.first.weight.data.clamp_(-0.1, 0.1)
        x = self.first(x)
        if self.way == "value":
            with torch.no_grad():
                x.clamp_(-1, 1)
        if self.way == "copy":
            x = x + (x.clamp(-1, 1) - x).detach()
        return x.square().sum()


VALUE = (
    "x.clamp_(-1, 1)",
    "a value that has a gradient is changed in place (clamp_)",
    "write to a copy that has its gradient:  x = x + (x.clamp(-1, 1) - x).detach()",
)
WEIGHT = (
    "self.first.weight.data.clamp_(-0.1, 0.1)",
    "the parameter `first.weight` is changed in place (clamp_)",
    "leave that to the script, after optimizer.step():  with torch.no_grad(): "
    "model.get_parameter('first.weight').clamp_(-0.1, 0.1)",
)


@pytest.mark.parametrize(("way", "said"), [("value", VALUE), ("weight", WEIGHT)])
def test_a_write_that_the_gradient_would_not_know_of_is_refused(
    way: str, said: tuple[str, str, str]
) -> None:
    with pytest.raises(CaptureRefused) as caught:
        capture(Clamped(way), flatten_call((torch.randn(4, WIDTH),), {}))
    lines = str(caught.value).splitlines()
    source, what, line = said
    assert lines[0] == "error[GA102]: cannot capture `Clamped.forward`: this has no graph"
    assert lines[2].endswith(source)
    assert lines[4:] == [
        f"  why:  {what} under torch.no_grad(), or through detach() or .data, which the gradient "
        "would not know of",
        f"  help: {line}",
        "  explain: graphaccel explain GA102",
    ]


class Scaled(nn.Module):
    """A weight that the first batch sets, as in Glow's ActNorm. Inputs [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.scale.data.copy_(1 / x.std(0))
            self.initialized.fill_(1)
        return (x * self.scale).square().mean()


def test_a_weight_that_the_first_batch_sets_is_set_before() -> None:
    batch, model = torch.randn(4, WIDTH, dtype=torch.float64), Scaled().double()
    with pytest.raises(CaptureRefused) as caught:
        graphaccel.optimize(copy.deepcopy(model), devices=1, example_batch=(batch,))
    assert caught.value.help_line == (
        "if the first forward alone does it, run that before:  model(batch)  "
        "# then graphaccel.optimize(model, optimizer)"
    )
    wanted = model(batch)
    graphaccel.optimize(model, devices=1)
    torch.testing.assert_close(model(batch), wanted)


def test_what_the_help_says_is_what_was_meant() -> None:
    x, found = 3 * torch.randn(4, WIDTH, dtype=torch.float64), []
    for way in ("value", "copy"):
        torch.manual_seed(2)
        model = Clamped(way).double()
        if way == "copy":
            graphaccel.optimize(model, devices=1)
        model(x).backward()
        found.append(model.first.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    with torch.no_grad(): model.get_parameter('first.weight').clamp_(-0.1, 0.1)  # fmt: skip  # noqa: E701
    assert model.first.weight.abs().max() <= 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-params"])
def test_a_frozen_model_is_planned(precision: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    model.requires_grad_(False)
    made = graphaccel.plan(
        model,
        (torch.randn(4, WIDTH), torch.randint(2, (4,))),
        loss_fn=F.cross_entropy,
        devices=2,
        device="h100-80gb",
        precision=precision,
    )
    assert made.prediction is not None
    assert made.prediction.optimizer == 0
    assert made.prediction.compute > 0


def test_ops_without_gradients_know_their_line_and_module() -> None:
    step = capture(Averaged(), flatten_call((torch.randn(4, WIDTH), torch.randn(4, WIDTH)), {}))
    (written,) = [n for n in step.forward.graph.graph.nodes if "lerp" in str(n.target)]
    trace = written.meta["stack_trace"]
    assert "self.mean.lerp_(hidden.mean(0), 0.1)" in trace
    assert "eval_with_key" not in trace
