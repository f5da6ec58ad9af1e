"""An exported forward becomes functional as torch makes it so, without running it a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.export.decompose import decomposed
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.trace import Answers
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import FakeTensorMode
from tests.capture.test_trace import rows
from tests.support.zoo import ZOO

aten = torch.ops.aten


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that torch was asked to decompose."""
    real, found = torch.export.ExportedProgram.run_decompositions, []

    def noting(program: Any, table: Any) -> Any:
        found.append(str(program.graph))
        return real(program, table)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", noting)
    return found


@dataclass(frozen=True)
class SimpleSignature:
    """What is read of an exported program's signature."""

    inputs_to_buffers: dict[str, str]
    output_specs: tuple[Any, ...] = ()


def told(module: Any) -> list[Any]:
    """What a graph says, without checks that are dropped and what only a step needs."""
    for node in module.graph.find_nodes(
        op="call_function", target=aten._assert_tensor_metadata.default
    ):
        module.graph.erase_node(node)

    def without_gradient(value: Any) -> Any:
        if isinstance(value, tuple) and value and isinstance(value[-1], bool):
            return value[:-1]
        return [*map(without_gradient, value)] if isinstance(value, list) else value

    return [
        [name, target, args, without_gradient(laid), said[1]]
        for name, target, args, laid, said in rows(module)
    ]


def written_by(program: Any) -> list[Any]:
    """The inputs that a program writes, in the order of its results."""
    return [spec.target for spec in program.graph_signature.output_specs]


def dropped(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5).reshape(-1).to(torch.float64).float()


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean().contiguous()
    return x * scale


def written(x: Tensor) -> Tensor:
    y = x + 1
    y[:, 0] = 0
    return y


def moved(x: Tensor) -> Tensor:
    y = x.new_empty(6, 4)
    y[..., 1:] = x[..., :-1].clone()
    y[:, 0].fill_(2).add_(x.mean())
    return y.view(-1).mul_(2).sin().detach_() * x.view(-1) + torch.tensor([0.5]).relu_()


def averaged_twice(x: Tensor, mean: Tensor) -> Tensor:
    with torch.no_grad():
        mean[1:].lerp_(x.mean(0)[1:], 0.1)
        mean.add_(1)
    return x - mean


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return averaged_twice(x, self.mean)


class Scaled(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale).sum()


class Normed(nn.Module):
    def __init__(self, training: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.trained = training

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(x, self.mean, self.var, training=self.trained)
        return nn.functional.batch_norm(y, None, None, training=True)


class NormedByInstance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.view(3, 4, 2)).view(6, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    **{
        name: (lambda name=name: ZOO[name].build()[:2])
        for name in ("gpt", "bert", "swin", "llama", "bart", "resnet")
    },
    "dropout": lambda: (Scaled(dropped), (torch.randn(6, 4),)),
    **{
        inner.__name__: (lambda inner=inner: (Scaled(inner), (torch.randn(6, 4),)))
        for inner in (without_gradient, written, moved)
    },
    "averaged": lambda: (Scaled(Averaged()), (torch.randn(6, 4),)),
    "normed": lambda: (Scaled(Normed()), (torch.randn(6, 4),)),
    "instance": lambda: (Scaled(NormedByInstance()), (torch.randn(6, 4),)),
    "evaluated": lambda: (Scaled(Normed(training=False)), (torch.randn(6, 4),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_graphs_are_those_of_torch(
    name: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = []

    def both(program: Any, answers: Answers | None) -> Any:
        own = decomposed(program, answers)
        before = len(asked)
        by_torch = program.run_decompositions({})
        pairs.append((before, written_by(own), written_by(by_torch)))
        pairs.append((len(asked), told(own.graph_module), told(by_torch.graph_module)))
        return own

    monkeypatch.setattr("graphaccel.capture.export.export.decomposed", both)
    model, batch = MODELS[name]()
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    capture(model, flatten_call(args, kwargs), symbolic=False)
    (before, *written), (after, *graphs) = pairs
    assert (before, after) == (0, 1)
    assert written[0] == written[1]
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("inner", "buffers"),
    [
        (without_gradient, []),
        (written, []),
        (Averaged(), ["mean"]),
        (Normed(), ["mean", "var"]),
        (NormedByInstance(), ["running_mean", "running_var"]),
    ],
)
def test_new_values_of_buffers_are_returned(
    inner: Callable[[Tensor], Tensor], buffers: list[str], asked: list[str]
) -> None:
    step = capture(Scaled(inner), flatten_call((torch.randn(6, 4),), {}), symbolic=False)
    assert asked == []
    assert [o.name.split(".")[-1] for o in step.outputs if o.kind == "buffer"] == buffers
    targets = {str(n.target) for n in step.forward.graph.graph.nodes}
    without = inner is without_gradient or isinstance(inner, (Averaged, NormedByInstance))
    assert ("aten.detach.default" in targets) == without


@pytest.mark.parametrize("trained", [True, False])
def test_batch_norm_is_the_same_ops_on_every_device(trained: bool) -> None:
    """Also where torch has a GPU's own op, which no rule and no pass knows."""

    def graph(device: str) -> list[Any]:
        sizes = {"x": (4, 3, 5, 5), **dict.fromkeys(("weight", "bias", "mean", "var"), (3,))}
        built = fx.Graph()
        places = [built.placeholder(name) for name in sizes]
        with FakeTensorMode():
            for place, size in zip(places, sizes.values(), strict=True):
                place.meta["val"] = torch.empty(size, device=device)
        normed = built.call_function(
            aten.batch_norm.default, (*places, trained, 0.1, 1e-5, device == "cuda")
        )
        built.output((normed,))
        buffers = {name: name for name in ("mean", "var")}
        signature = SimpleSignature(buffers)
        program = SimpleNamespace(
            graph_module=fx.GraphModule({}, built), graph_signature=signature, constants={}
        )
        own = decomposed(program)
        assert [s.target for s in own.graph_signature.output_specs] == [*buffers] * trained
        values = [pytree.tree_leaves(n.meta.get("val")) for n in own.graph_module.graph.nodes]
        assert {v.device.type for of in values for v in of if v is not None} == {device}
        return [(n.name, str(n.target), str(n.args)) for n in own.graph_module.graph.nodes]

    assert graph("cuda") == graph("cpu")


def test_an_own_op_of_the_user_is_left_to_torch(asked: list[str]) -> None:
    with torch.library._scoped_library("graphaccel_test_decompose", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        op = torch.ops.graphaccel_test_decompose.twice

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, x: Tensor) -> Tensor:
                return (op(x) * self.scale).sum()

        capture(Model(), flatten_call((torch.randn(6, 4),), {}), symbolic=False)
    assert len(asked) == 1


COPIES: dict[str, Callable[[Tensor], Any]] = {
    "alias_copy": torch.alias_copy,
    "expand_copy": lambda x: torch.expand_copy(x[:, None], (-1, 3, -1)),
    "narrow_copy": lambda x: torch.narrow_copy(x, 1, 1, 2),
    "permute_copy": lambda x: torch.permute_copy(x, (1, 0)),
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, (1, 3), 1)[1],
    "squeeze_copy": lambda x: torch.squeeze_copy(x[:, None], 1),
    "transpose_copy": lambda x: torch.transpose_copy(x, 0, 1),
    "unbind_copy": lambda x: torch.unbind_copy(x, 1)[1],
    "unfold_copy": lambda x: torch.unfold_copy(x, 1, 2, 1),
    "unsqueeze_copy": lambda x: torch.unsqueeze_copy(x, 1),
    "view_copy": lambda x: torch.view_copy(x, (-1, 2)),
}


class Copied(nn.Module):
    """A copy that is written to, beside what it is a copy of."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.copy, self.scale = copy, nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        return (self.copy(scaled).mul_(3) ** 2).sum() + scaled.sum()


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_views_are_copies_of_what_has_a_rule(name: str) -> None:
    model, x = Copied(COPIES[name]), torch.randn(6, 4, dtype=torch.float64)
    step = capture(model, flatten_call((x,), {}), symbolic=False)
    assert not [n for n in step.graph.graph.nodes if str(n.target).split(".")[1:2] == [name]]
    loss, gradient = step.graph(model.scale.detach(), x)
    model(x).backward()
    torch.testing.assert_close(loss, model(x).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, model.scale.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [(64,), (3, 64)])
@pytest.mark.parametrize(
    "settings",
    [
        {"hop_length": 5},
        {"win_length": 9, "normalized": True, "center": False},
        {"onesided": False},
    ],
    ids=str,
)
def test_spectra_of_frames(settings: dict[str, Any], size: tuple[int, ...]) -> None:
    """Whose gradients torch adds up by places in memory, for which there is no rule."""
    window = torch.hann_window(settings.get("win_length", 16), dtype=torch.float64)
    given = {"n_fft": 16, "return_complex": True, "window": window, **settings}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(1, 2, 64, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stft(x * self.scale, **given).abs().square().mean()

    model, x = Model(), torch.randn(size, dtype=torch.float64)
    step = capture(model, flatten_call((x,), {}), symbolic=False)
    assert not step.graph.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    places = {"parameter": model.scale.detach(), "batch": x}
    inputs = [places.get(spec.kind, window) for spec in step.inputs]
    loss, gradient = step.graph(*inputs)
    model(x).backward()
    torch.testing.assert_close(loss, model(x).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, model.scale.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rows", [6, 1])
def test_what_losses_broadcast(rows: int, asked: list[str]) -> None:
    """torch's losses ask for tensors of one shape, which is no call where they have it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            first, second = torch.broadcast_tensors(x * self.scale, y)
            return (first.mul_(2) - second).square().sum()

    model, x = Model(), torch.randn(6, 4, dtype=torch.float64)
    y = torch.randn(rows, 4, dtype=torch.float64)
    step = capture(model, flatten_call((x, y), {}), symbolic=False)
    targets = {n.target for n in step.forward.graph.graph.nodes}
    assert aten.broadcast_tensors.default not in targets
    assert (aten.expand.default in targets) == (rows == 1)
    assert not asked
    loss, gradient = step.graph(model.scale.detach(), x, y)
    model(x, y).backward()
    torch.testing.assert_close(loss, model(x, y).detach())
    torch.testing.assert_close(gradient, model.scale.grad)


def test_complex_numbers_are_seen_as_real_ones(asked: list[str]) -> None:
    """Also where the view is written to."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex((x * self.scale).unflatten(1, (4, 2))) * (1 + 2j)
            torch.view_as_real(turned)[..., 0].mul_(3)
            return torch.view_as_real(turned).flatten(1).sin().sum() + turned.abs().sum()

    model, x = Model(), torch.randn(6, 8, dtype=torch.float64)
    step = capture(model, flatten_call((x,), {}))
    assert not asked
    loss, gradient = step.graph(model.scale.detach(), x)
    model(x).backward()
    torch.testing.assert_close(loss, model(x).detach())
    torch.testing.assert_close(gradient, model.scale.grad)
