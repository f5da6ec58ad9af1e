"""Weights that a model reaches past its tree of modules: through functions, lists, attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import Lock
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.capture.layers.runs import find_runs
from graphaccel.capture.state.closures import copied, read_attribute
from graphaccel.compiler.model import without_data
from tests.support.steps import WIDTH, assert_as_eager

WIDE = 2 * WIDTH


class Block(nn.Module):
    """As minGPT has it: a dict of layers, and a function that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(WIDTH, WIDE), "act": nn.GELU(), "down": nn.Linear(WIDE, WIDTH)}
        )
        m = self.mlp
        self.mlpf = lambda x: m.down(m.act(m.up(x)))
        self.table = torch.full((WIDTH,), 2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlpf(self.norm(x)) * self.table


class Deep(nn.Module):
    """`layers` blocks, run by a function that holds the model. odd: one has another table."""

    def __init__(self, layers: int, odd: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        if odd:
            self.blocks[5].table.fill_(3.0)
        self.run = lambda x: self._through(x)

    def _through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.run(x), y)


def test_a_deep_model_of_blocks_with_functions() -> None:
    """Captured from few layers, with the function of the whole model too."""
    step = assert_as_eager(lambda: Deep(8), steps=2)
    assert step.repeats is not None
    tables = {f"blocks.{i}.table" for i in range(8)}
    assert set(step.forward.attributes.values()) == tables
    assert all(name == f"model.{path}" for name, path in step.forward.attributes.items())


def test_layers_with_other_tensors_are_no_row() -> None:
    assert [run.count for run in find_runs(Deep(8), 8)] == [8]
    assert find_runs(Deep(8, odd=True), 8) == ()


class Reached(nn.Module):
    """Its second layer is reached in every way but through the tree of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        second = self.second

        def with_default(x: Tensor, layer: nn.Module = second) -> Tensor:
            return layer(x)

        def recursive(x: Tensor, count: int = 2) -> Tensor:
            return second(x) if not count else recursive(x, count - 1)

        self.ways: list[Callable[[Tensor], Tensor]] = [
            functools.partial(F.linear, weight=second.weight),
            with_default,
            second.forward,
            self._own,
            lambda x: second(x),
            recursive,
            functools.wraps(with_default)(lambda x: with_default(x)),
            lambda x, w=[second.weight]: x @ w[0],
        ]
        self.one = MethodType(lambda _, x: second(x), self)

    def _own(self, x: Tensor) -> Tensor:
        return self.second(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for way in (*self.ways, self.one):
            x = way(torch.tanh(self.first(x)))
        return F.mse_loss(x, y)


def test_every_way_to_a_layer() -> None:
    assert_as_eager(Reached)


def test_functions_that_reach_nothing_stay_themselves() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, scale = nn.Linear(2, 2), [3.0]
            self.act, self.scaled = F.gelu, lambda x: x * scale[0]

    model = Plain()
    made = without_data(model)
    assert made.act is model.act
    assert made.scaled is model.scaled
    assert copied(F.gelu, {}, [model]) is F.gelu


class Held(nn.Module):
    """A buffer that the forward changes, read under another name; a frozen teacher in a list; an
    attribute of a loaded model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.teacher = [nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)]
        self.seen = self.layer(torch.ones(WIDTH))  # has a gradient, and is not read

    def double(self) -> nn.Module:
        made = super().double()
        made.same = [made.mean]
        return made

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x)
        self.mean.add_(hidden.detach().mean(0))
        return F.mse_loss(hidden + self.same[0], self.teacher[0](y))


def test_what_a_model_holds_otherwise() -> None:
    step = assert_as_eager(Held)
    assert sorted(step.forward.attributes.values()) == ["teacher.0.bias", "teacher.0.weight"]
    model = Held()
    assert read_attribute(model, "teacher.0.bias") is model.teacher[0].bias


class Answers(dict):
    """A configuration that answers every name, those that `copy.deepcopy` asks for as well."""

    __getattr__ = dict.__getitem__


class Uncopied(nn.Module):
    """Holds what cannot be copied; calls come in a form of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.config, self.lock = nn.Linear(WIDTH, 1), Answers(scale=2.0), Lock()

    def __call__(self, *batch: Tensor) -> Tensor:
        return 3.0 * super().__call__(batch[0] + 1.0)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.config.scale * self.layer(x).square().mean()


def test_what_cannot_be_copied_and_a_call_of_its_own() -> None:
    torch.manual_seed(0)
    plain, ours = Uncopied().double(), Uncopied().double()
    ours.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    graphaccel.optimize(ours, optimizers[1], devices=1)
    for number in range(3):
        x, losses = torch.randn(4, WIDTH).double(), []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            model.config["scale"] = 2.0 + number
            optimizer.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            optimizer.step()
        assert (losses[0] - losses[1]).abs() <= 1e-12
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-12
