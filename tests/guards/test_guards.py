"""Python state that the forward reads: noticed, an input of the graph, or captured anew."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel.capture.batch import flatten_call
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of
from tests.support.inside import captures_in

SCALE = 1.0
TABLE = {"scale": [1.0, 2.0]}


class Base:
    """Attributes of a class."""

    gain = 1.0

    def twice(self, h: Tensor) -> Tensor:
        return 2 * h


class Own(nn.Module):
    """A submodule of the script's; `forward(h)` → h."""

    def forward(self, h: Tensor) -> Tensor:
        return h


class Net(nn.Module, Base):
    """`forward(x)` → loss; `use(self, h)` reads the state."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(0.0)
        self.use, self.alpha, self.flag, self.count = use, 1.0, True, 0
        self.table, self.tables = torch.ones(4), [torch.ones(4)]
        self.config = SimpleNamespace(scale=1.0, unread=0)
        self.settings, self.sizes = {"scale": 1.0}, [1.0, 2.0]
        self.recent, self.own = deque([1.0, 2.0], maxlen=2), Own()
        self.scale_0, self.part = 1.0, functools.partial(torch.mul, other=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.use(self, self.a(x))).square().mean()


def closure(value: float) -> tuple[Callable[[Any, Tensor], Tensor], Callable[[float], None]]:
    def use(_: Any, h: Tensor, shift: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return h * value + shift[0]

    def change(new: float) -> None:
        nonlocal value
        value = new

    use.change = change  # type: ignore[attr-defined]
    return use, change


def guarded(model: nn.Module) -> Any:
    """What guards a forward of a model, without capturing it."""
    captures = Captures(model_of(model, None, None, "cpu"))
    batch = flatten_call((torch.ones(2, 4),), {})
    step: Any = SimpleNamespace(
        training=True, inputs=(), sizes={}, forward=SimpleNamespace(constants={}, attributes={})
    )
    return captures.guards(step, batch)


def put(where: Any, name: Any, value: Any) -> Callable[[], None]:
    if isinstance(where, (dict, list)):
        return lambda: where.__setitem__(name, value)
    return lambda: setattr(where, name, value)


USES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Callable[[], Any]]]] = {
    "a number": (lambda s, h: h * s.alpha, lambda s: put(s, "alpha", 2.0)),
    "its type": (lambda s, h: h * s.alpha, lambda s: put(s, "alpha", 1)),
    "a flag": (lambda s, h: h if s.flag else -h, lambda s: put(s, "flag", False)),
    "a name made at run time": (
        lambda s, h: h * getattr(s, f"scale_{0}"),
        lambda s: put(s, "scale_0", 2.0),
    ),
    "vars": (lambda s, h: h * vars(s)["alpha"], lambda s: put(s, "alpha", 2.0)),
    "an absent attribute": (
        lambda s, h: h * getattr(s, "late", 1.0),
        lambda s: put(s, "late", 2.0),
    ),
    "dropout": (lambda s, h: s.drop(h), lambda s: put(s.drop, "p", 0.5)),
    "a submodule's mode": (lambda s, h: s.drop(h), lambda s: s.drop.eval),
    "a configuration": (lambda s, h: h * s.config.scale, lambda s: put(s.config, "scale", 2.0)),
    "another configuration": (
        lambda s, h: h * s.config.scale,
        lambda s: put(s, "config", SimpleNamespace(scale=2.0)),
    ),
    "a dict": (lambda s, h: h * s.settings["scale"], lambda s: put(s.settings, "scale", 2.0)),
    "a list": (lambda s, h: h * sum(s.sizes), lambda s: put(s.sizes, 1, 3.0)),
    "a deque": (lambda s, h: h * sum(s.recent), lambda s: lambda: s.recent.append(3.0)),
    "a method": (lambda s, h: s.twice(h), lambda s: put(s, "twice", lambda h: 3 * h)),
    "a method of its class": (lambda s, h: s.twice(h), lambda s: put(Base, "twice", torch.neg)),
    "a submodule's forward": (lambda s, h: s.drop(h), lambda s: put(s.drop, "forward", torch.neg)),
    "its class's forward": (lambda s, h: s.own(h), lambda s: put(Own, "forward", lambda _, h: -h)),
    "a longer list": (lambda s, h: h * sum(s.sizes), lambda s: lambda: s.sizes.append(1.0)),
    "a tensor in place": (lambda s, h: h * s.table, lambda s: lambda: s.table.fill_(2.0)),
    "a tensor": (lambda s, h: h * s.table, lambda s: put(s, "table", torch.zeros(4))),
    "a tensor in a list": (lambda s, h: h * s.tables[0], lambda s: s.tables[0].zero_),
    "a partial": (
        lambda s, h: s.part(h),
        lambda s: put(s, "part", functools.partial(torch.mul, other=3.0)),
    ),
    "a function": (lambda s, h: h, lambda s: put(s, "use", lambda _, h: -h)),
    "a class attribute": (lambda s, h: h * s.gain, lambda s: put(s, "gain", 2.0)),
    "a global": (lambda s, h: h * SCALE, lambda s: put(globals(), "SCALE", 2.0)),
    "a container's item": (
        lambda s, h: h * TABLE["scale"][1],
        lambda s: put(TABLE["scale"], 1, 5.0),
    ),
}


@pytest.mark.parametrize("name", USES)
def test_what_the_forward_reads_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(TABLE, "scale", [1.0, 2.0])
    monkeypatch.setattr(Base, "twice", Base.twice)
    monkeypatch.setattr(Own, "forward", Own.forward)
    use, change = USES[name]
    model = Net(use)
    guards = guarded(model)
    assert guards.hold()
    if name != "vars":  # which reads them all
        model.count, model.config.unread, model.step = 3, 1, 7
    assert guards.hold()
    change(model)()
    assert not guards.hold()


def test_closures_and_defaults_are_noticed() -> None:
    use, change = closure(1.0)
    guards = guarded(Net(use))
    assert guards.hold()
    change(2.0)
    assert not guards.hold()
    change(1.0)
    assert guards.hold()
    use.__defaults__[0].append(2.0)  # type: ignore[attr-defined]
    assert not guards.hold()


def test_a_value_that_comes_back_and_equal_ones_hold() -> None:
    model = Net(lambda s, h: h * s.alpha * s.config.scale)
    guards = guarded(model)
    model.alpha, model.config = float("1.0"), SimpleNamespace(scale=1.0)
    assert guards.hold()
    model.alpha = 2.0
    assert not guards.hold()
    model.alpha = 1.0
    assert guards.hold()


def test_a_cache_that_the_forward_fills_once_is_no_state() -> None:
    def cached(s: Any, h: Tensor) -> Tensor:
        if getattr(s, "cache", None) is None:
            s.cache = torch.arange(4.0)
        return h * s.cache

    model = Net(cached)
    guards = guarded(model)
    assert guards.hold()
    model.cache = torch.arange(4.0)
    assert guards.hold()


def trained(
    use: Callable[[Any, Tensor], Any], change: Callable[[Any, int], Any], steps: int = 3
) -> tuple[float, int]:
    """How far three steps of SGD are from eager's in float64, and how many captures they took."""
    torch.manual_seed(0)
    eager = Net(use).double()
    planned = copy.deepcopy(eager)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, planned)]
    graphaccel.optimize(planned, optimizers[1], devices=1)
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(6, 4).sin()
    for step in range(steps):
        for model, optimizer in zip((eager, planned), optimizers, strict=True):
            change(model, step)
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    ours = planned.state_dict()
    off = max(float((v - ours[k]).abs().max()) for k, v in eager.state_dict().items())
    return off, len(captures_in(planned).steps)


def test_a_schedule_of_numbers_is_captured_once_more() -> None:
    """In a scaled sum, a quotient, a power and a loss of no dims, where promotion matters."""

    def use(s: Any, h: Tensor) -> Tensor:
        h = (h - s.alpha) / (2 - s.settings["scale"]) + h.square().mean() * (1 - s.alpha)
        return s.alpha - h.abs() ** s.alpha

    def change(s: Any, step: int) -> None:
        s.alpha, s.settings["scale"] = 1 + step / 3, 1.0 + 0.1 * step

    off, captures = trained(use, change, steps=5)
    assert off < 1e-14
    assert captures == 2


def test_what_no_tensor_stands_for_is_captured_for_each_value() -> None:
    def change(s: Any, step: int) -> None:
        s.drop.p, s.flag = float(step % 2), step != 3

    off, captures = trained(lambda s, h: s.drop(h) if s.flag else -h, change, steps=6)
    assert off < 1e-14
    assert captures == 3


def test_tensors_are_read_without_a_capture() -> None:
    def change(s: Any, step: int) -> None:
        s.tables[0].fill_(step)
        s.table = s.table * 0 + step

    off, captures = trained(lambda s, h: h * s.table + s.tables[0], change)
    assert off < 1e-14
    assert captures == 1


def test_a_submodule_that_changes_its_mode_is_captured_anew() -> None:
    off, captures = trained(
        lambda s, h: F.batch_norm(h, None, None, training=True) if s.drop.training else h,
        lambda s, step: s.drop.train(step != 1),
    )
    assert off < 1e-14
    assert captures == 2


def test_an_example_may_come_while_the_model_evaluates() -> None:
    torch.manual_seed(0)
    model = Net(lambda s, h: h * s.alpha)
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    graphaccel.optimize(model.eval(), devices=1, example_batch=(x,))
    for training, alpha in ((False, 1.0), (True, 1.0), (True, 3.0)):
        model.train(training).alpha = plain.train(training).alpha = alpha
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(model(x), plain(x))


def test_another_default_dtype_is_captured_anew() -> None:
    def use(net: Net, h: Tensor) -> Tensor:
        return h * torch.full((4,), 0.1)  # float64 where that is the default

    model, plain = Net(use), Net(use)
    plain.load_state_dict(model.double().state_dict())
    plain.double()
    graphaccel.optimize(model, devices=1, check="off")
    x = torch.randn(4, 4, dtype=torch.float64)
    before, counts = torch.get_default_dtype(), []
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert torch.equal(model(x), plain(x))
            counts.append(len(captures_in(model).steps))
    finally:
        torch.set_default_dtype(before)
    assert counts == [1, 2, 2]


class Listed(nn.Module):
    """`forward(x)`: [B, 4] → loss, by a number in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 4), [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return self.weights[0] * self.layer(x).square().mean()


def test_a_number_in_a_list_is_an_input_at_every_size() -> None:
    model = Listed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1, check="off")
    for number in range(2):
        model.weights[0] = 1.0 + number
        model(torch.randn(2, 4))
    first, second = captures_in(model).steps.values()
    assert first.sizes.keys() == second.sizes.keys() != set()
    assert [s.name for s in second.inputs if s.kind == "batch"] == ["args[0]", "weights[0]"]
