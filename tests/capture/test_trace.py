"""Steps are traced as torch traces them, by asking each call once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from graphaccel.capture import differentiate
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.trace import Answers, NotTraced, trace
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.tensors import storage_key
from tests.support.zoo import ALL

aten = torch.ops.aten
Function = Callable[..., Sequence[Tensor]]
LOOKS = {aten.detach.default, aten.alias.default}


def rows(module: fx.GraphModule) -> list[Any]:
    """A graph without calls that nothing reads or that change nothing: names, arguments by their
    rows, where each comes from, and how its value lies in which storage."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target in LOOKS:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    place: dict[fx.Node, int] = {}
    storages: dict[int, int] = {}

    def told(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [told(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        memory = storages.setdefault(storage_key(value), len(storages))
        size = value.untyped_storage().nbytes()
        laid = value.shape, value.stride(), value.storage_offset(), size
        return value.dtype, str(value.device), *laid, memory, value.requires_grad

    found = []
    for node in graph.nodes:
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: f"row {place[n]}")
        place[node] = len(place)
        name = node.name if node.op == "call_function" else node.op
        said = [node.meta.get(key) for key in ("custom", "nn_module_stack")]
        found.append([name, str(node.target), repr(args), told(node.meta.get("val")), said])
        if node.op == "placeholder":
            found[-1][1] = ""
    return found


def fakes(mode: FakeTensorMode, *tensors: Tensor) -> list[Tensor]:
    made = [mode.from_tensor(t.detach()).detach() for t in tensors]
    return [t.requires_grad_() if t.is_floating_point() else t for t in made]


def gradients_of(loss: Callable[..., Tensor]) -> Function:
    def step(*values: Tensor) -> list[Tensor]:
        found = loss(*values)
        return [found, *torch.autograd.grad(found, [v for v in values if v.requires_grad])]

    return step


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever is differentiated is traced both ways, and compared; has an item for each."""
    compared: list[int] = []

    def checked(
        step: Function, values: Sequence[Tensor], mode: FakeTensorMode, answers: Answers | None
    ) -> fx.GraphModule:
        made = trace(step, values, mode, answers)
        again = [v.detach().requires_grad_(v.requires_grad) for v in values]
        with mode:
            expected = make_fx(step)(*again)
        ours, torchs = rows(made), rows(expected)
        for one, other in zip(ours, torchs, strict=True):
            assert one == other
        compared.append(len(ours))
        return made

    monkeypatch.setattr(differentiate, "trace", checked)
    return compared


@pytest.mark.parametrize("name", ["gpt", "bart", "swin", "resnet", "mixtral"])
def test_as_torch_traces_it(name: str, both: list[int]) -> None:
    entry = ALL[name]
    model, batch, loss = entry.build()
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    capture(model.train(), flatten_call(args, kwargs), None if loss is None else "outside")
    assert len(both) >= 1
    assert min(both) > 50


def test_dropout_writes_over_its_mask(both: list[int]) -> None:
    """Attention with dropout fills a mask in place: a call that gives what it was given."""
    config = transformers.T5Config(
        d_model=16, d_ff=32, d_kv=8, num_heads=2, num_layers=1, vocab_size=32, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.ones(8, 6, dtype=torch.int64)
    model = transformers.T5ForConditionalGeneration(config).train()
    capture(model, flatten_call((), {"input_ids": ids, "labels": ids}))
    assert len(both) == 3


def test_what_a_trace_learned_is_not_asked_again() -> None:
    """By one of the same calls on other tensors: its results are its own."""
    asked: list[str] = []

    class Mode(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
            asked.append(str(func))
            return super().__torch_dispatch__(func, *rest)

    def loss(x: Tensor) -> Tensor:
        return (x.view(4, 6).exp() * 2.0).sum()

    answers: Answers = {}
    step, modes = gradients_of(loss), [Mode() for _ in range(3)]
    graphs = []
    for mode in modes:
        values = fakes(mode, torch.ones(2, 12))
        asked.clear()
        graphs.append(trace(step, values, mode, answers if mode is not modes[2] else None))
        calls = {str(n.target) for n in graphs[-1].graph.nodes if n.op == "call_function"}
        assert bool(calls & set(asked)) == (mode is not modes[1])
    assert rows(graphs[0]) == rows(graphs[1]) == rows(graphs[2])
    for mode, graph in zip(modes, graphs, strict=True):
        assert all(n.meta["val"].fake_mode is mode for n in graph.graph.nodes if "val" in n.meta)


def test_views_in_another_dtype(both: list[int]) -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            bits = y.detach().view(torch.int32).bitwise_and(7)
            pairs = torch.view_as_complex(y.unflatten(1, (2, 2)))
            return (y * bits).sum() + torch.view_as_real(pairs + 1).square().sum()

    capture(Seen(), flatten_call((torch.ones(4, 4),), {}))
    assert both


def test_views_are_of_one_storage_and_results_of_their_own() -> None:
    mode = FakeTensorMode()

    def loss(x: Tensor) -> Tensor:
        a, b = x.view(4, 6).t().split(3)
        return ((a * 2.0).exp() + (b * 2.0).exp() + (b * 2).exp()).sum()

    module = trace(gradients_of(loss), fakes(mode, torch.ones(2, 12)), mode)
    kinds: dict[Any, list[int]] = {}
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            kinds.setdefault(node.target, []).append(storage_key(node.meta["val"]))
    (given,) = (v for k, v in kinds.items() if isinstance(k, str) and k != "output")
    assert set(kinds[aten.view.default][:1] + kinds[aten.t.default][:1]) == set(given)
    assert len(set(kinds[aten.exp.default])) == 3
    products = module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert int in [type(n.args[1]) for n in products]  # 2 is not 2.0


OUTSIDE = torch.ones(3)


def reads_outside(x: Tensor) -> Tensor:
    return (x * OUTSIDE).sum()


def writes_elsewhere(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    torch.exp(x.detach(), out=y)
    return (x * y).sum()


def lays_otherwise(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    return (x * y.unsqueeze_(0)).sum()


def by_its_values(x: Tensor) -> Tensor:
    return (x * x.detach().sum().item()).sum()


def of_other_shape(x: Tensor) -> Tensor:
    return x[x.detach() > 0].sum()


def squared_as_complex(x: Tensor) -> Tensor:
    """Gives up in the backward alone, which conjugates by a flag."""
    pairs = torch.complex(x, x)
    return (pairs * pairs).abs().sum()


@pytest.mark.parametrize(
    "loss",
    [
        reads_outside,
        writes_elsewhere,
        lays_otherwise,
        by_its_values,
        of_other_shape,
        squared_as_complex,
    ],
)
def test_gives_up(loss: Callable[..., Tensor]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(NotTraced):
        trace(gradients_of(loss), fakes(mode, torch.ones(3)), mode)


def test_where_it_gives_up_torch_traces(caplog: pytest.LogCaptureFixture) -> None:
    """A model that writes over a part of a value is captured all the same, and says which way."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y[:, 0] = 0.0
            return squared_as_complex(y) + y.square().sum()

    with caplog.at_level(logging.INFO, "graphaccel.capture"):
        step = capture(Writes(), flatten_call((torch.ones(4, 4),), {}))
    assert "traced by make_fx" in caplog.text
    assert any(o.kind == "gradient" for o in step.outputs)


def test_nothing_stays_of_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it gives up in the backward, or after it."""
    model, batch, _ = ALL["gpt"].build()
    given = flatten_call((), batch) if isinstance(batch, dict) else flatten_call(batch, {})
    expected = capture(model.train(), given)

    def late(
        step: Function, values: Sequence[Tensor], mode: FakeTensorMode, answers: Answers | None
    ) -> fx.GraphModule:
        trace(step, values, mode, answers)
        differentiate.fx_traceback.current_meta["custom"] = {"origin": "", "phase": "backward"}
        raise NotTraced("late")

    monkeypatch.setattr(differentiate, "trace", late)
    assert capture(model, given).text() == expected.text()


def test_among_fake_tensors_of_another() -> None:
    mode = FakeTensorMode()
    given = fakes(mode, torch.ones(3))
    with FakeTensorMode():
        module = trace(gradients_of(lambda x: (x * 2).sum()), given, mode)
    assert all(n.meta["val"].fake_mode is mode for n in module.graph.nodes if n.op != "output")
