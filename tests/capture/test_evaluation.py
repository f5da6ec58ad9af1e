"""The evaluation step, derived from the captured training step where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.evaluation import in_evaluation
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of


class Net(nn.Module):
    """Linear, something, linear; float64."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between = between
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: f64[b, 6], y: i64[b]."""
        h = self.first(x)
        h = self.between(h) if isinstance(self.between, nn.Module) else self.between(self, h)
        return F.cross_entropy(self.last(h), y)


class Attention(nn.Module):
    """Attention over the batch, by torch's module and by its function."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.5)
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """f64[b, 8] -> f64[b, 8]."""
        x = x.unsqueeze(1)
        x = self.heads(x, x, x, need_weights=False)[0]
        return F.scaled_dot_product_attention(
            *(x[None],) * 3, dropout_p=self.rate if self.training else 0
        )[0, :, 0]


def batch(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.arange(rows) % 3}


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    return GPT2LMHeadModel(config).double()


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) % 32
    return {"input_ids": ids, "labels": ids.clone()}


DERIVED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "dropout": (lambda: Net(nn.Dropout(0.5)), batch),
    "dropout that another sum reads": (
        lambda: Net(lambda m, h: h + F.dropout(h, 0.5, m.training)),
        batch,
    ),
    "nothing differs": (lambda: Net(nn.GELU()), batch),
    "batch norm": (lambda: Net(nn.BatchNorm1d(8)), batch),
    "attention": (lambda: Net(Attention()), batch),
    "GPT-2": (gpt2, tokens),
}


def captured(model: nn.Module, inputs: dict[str, Tensor]) -> Captures:
    """The captures of a model, with that of its training step."""
    captures = Captures(model_of(model, None, None, "cpu"))
    captures.of(flatten_call(*as_call(inputs)))
    return captures


def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each export."""
    calls: list[int] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return calls


def moved(model: nn.Module) -> None:
    """Give batch norm statistics that are not those of its start."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.copy_(torch.linspace(-1, 1, 8))
            module.running_var.copy_(torch.linspace(0.5, 2, 8))


def loss_of(step: StepGraph, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the forward graph computes, which was captured at the sizes of these inputs."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    known = {**state, **step.forward.constants, **inputs}
    return step.forward.graph(*(known[spec.name] for spec in step.forward.inputs))[0]


@pytest.mark.parametrize("name", DERIVED)
def test_derived_without_an_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, given = DERIVED[name]
    torch.manual_seed(0)
    model = make()
    moved(model)
    expected_buffers = {n: b.clone() for n, b in model.named_buffers()}
    inputs = given()
    captures = captured(model, inputs)
    calls = exports(monkeypatch)
    model.eval()
    step, _ = captures.of(flatten_call(*as_call(inputs)), training=False)
    assert not calls
    assert not step.training
    assert "native_dropout" not in step.text()
    expected = model(**inputs)
    expected = expected if isinstance(expected, Tensor) else expected.loss
    torch.testing.assert_close(loss_of(step, model, inputs), expected, rtol=1e-12, atol=0)
    assert all(torch.equal(b, expected_buffers[n]) for n, b in model.named_buffers())


def test_derived_for_batches_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(nn.Dropout(0.5))
    captures = captured(model, batch(4))
    calls = exports(monkeypatch)
    model.eval()
    step, sizes = captures.of(flatten_call(*as_call(batch(10))), training=False)
    assert not calls
    assert [*sizes.values()] == [10]
    again, _ = captures.of(flatten_call(*as_call(batch(6))), training=False)
    assert again is step


def test_a_first_evaluation_is_derived_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(nn.Dropout(0.5))
    captures = captured(model, batch(4))
    calls = exports(monkeypatch)
    model.eval()
    step, sizes = captures.of(flatten_call(*as_call(batch(4))), training=False, fixed=True)
    assert sizes == {}
    other, sizes = captures.of(flatten_call(*as_call(batch(6))), training=False, fixed=True)
    assert [*sizes.values()] == [6]
    assert other is not step
    assert not calls


def other_branch(model: nn.Module, h: Tensor) -> Tensor:
    return h.relu() if model.training else h.tanh()


def other_tensor(model: nn.Module, h: Tensor) -> Tensor:
    """The same functions, on other tensors."""
    one, two = h.relu(), h.tanh()
    return one * 1 if model.training else two * 1


def dropout_in_both(model: nn.Module, h: Tensor) -> Tensor:
    return F.dropout(h, 0.5, training=True)


def one_dropout_in_both(model: nn.Module, h: Tensor) -> Tensor:
    """Two calls, of which one drops values in evaluation mode too."""
    return torch.dropout(F.dropout(h, 0.5, model.training), 0.5, True)


def other_number(model: nn.Module, h: Tensor) -> Tensor:
    return h * (1.0 if model.training else 2.0)


def at_long_batches(model: nn.Module, h: Tensor) -> Tensor:
    """Differs at sizes that no capture has seen."""
    return h * 2 if not model.training and len(h) > 7 else h * 1


ANEW: dict[str, Callable[[], nn.Module]] = {
    name.__name__: (lambda name=name: Net(name))
    for name in (other_branch, other_tensor, other_number, at_long_batches)
} | {"statistics of each batch": lambda: Net(nn.BatchNorm1d(8, track_running_stats=False))}


@pytest.mark.parametrize("name", ANEW)
def test_captured_anew_where_evaluation_computes_something_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ANEW[name]()
    captures = captured(model, batch(4))
    calls = exports(monkeypatch)
    model.eval()
    rows = batch(10)
    step, _ = captures.of(flatten_call(*as_call(rows)), training=False)
    assert calls
    torch.testing.assert_close(loss_of(step, model, rows), model(**rows), rtol=1e-12, atol=0)


@pytest.mark.parametrize("between", [dropout_in_both, one_dropout_in_both])
def test_dropout_that_evaluation_has_too_stays(between: Any, monkeypatch: Any) -> None:
    model = Net(between)
    captures = captured(model, batch())
    calls = exports(monkeypatch)
    model.eval()
    step, _ = captures.of(flatten_call(*as_call(batch())), training=False)
    assert calls
    forward = [str(node.target) for node in step.forward.graph.graph.nodes]
    assert forward.count("aten.native_dropout.default") == 1


def test_text_of_a_derived_forward() -> None:
    step = capture(
        Net(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))), flatten_call((), batch())
    )
    forward = in_evaluation(step.forward)
    targets = [str(n.target) for n in forward.graph.graph.nodes if n.op == "call_function"]
    assert "aten._native_batch_norm_legit_no_training.default" in targets
    assert "aten.clone.default" in targets
    assert not any("dropout" in name or "functional" in name for name in targets)
    assert [output.kind for output in forward.outputs] == ["loss"]
    assert [output.kind for output in step.forward.outputs].count("buffer") == 3
