"""Where the batch goes in whole models, and where it may not be split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.passes.microbatch.exact_microbatch import batch_placement, split_limits
from graphaccel.planner.plan.limits import Limits
from graphaccel.sharding.rules.batch_placement import PARTIAL, REPLICATED, BatchPlacement
from graphaccel.sharding.rules.propagate import place_batch
from graphaccel.sharding.rules.shard import Shard
from tests.support.zoo import ZOO


class Model(nn.Module):
    """Two layers, a buffer-free head, and a loss given by a function of (model, hidden, labels)."""

    def __init__(self, loss: Callable[..., torch.Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)
        self.norm = norm or nn.Identity()
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self, self.norm(self.first(x)), labels)


def step_of(model: nn.Module) -> StepGraph:
    torch.manual_seed(0)
    return capture(model, flatten_call((torch.randn(8, 6), torch.randint(0, 5, (8,))), {}))


def placed(loss: Callable[..., torch.Tensor], norm: nn.Module | None = None) -> BatchPlacement:
    return batch_placement(step_of(Model(loss, norm)))


def outputs(step: StepGraph) -> dict[str, object]:
    """Placement of the loss and of each gradient."""
    places = batch_placement(step).places
    nodes = step.graph.graph.output_node().args[0]
    return {s.name or s.kind: places[n] for n, s in zip(nodes, step.outputs, strict=True)}


def classes(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.second(hidden), labels)


def test_loss_and_gradients_are_partial_sums() -> None:
    found = outputs(step_of(Model(classes)))
    assert set(found.values()) == {PARTIAL}
    assert len(found) == 5


def test_the_count_of_labels_is_hoisted() -> None:
    result = placed(classes)
    assert [str(n.target) for n in result.hoisted] == ["aten.sum.default"]
    assert not result.reduced
    assert not result.conflicts


def test_weighted_classes_hoist_the_sum_of_weights() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)
            self.register_buffer("weight", torch.arange(1.0, 6.0))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x), labels, weight=self.weight)

    result = batch_placement(step_of(Weighted()))
    assert not result.conflicts
    assert len(result.hoisted) + len(result.reduced) == 1


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
def test_losses_on_numbers_split(name: str) -> None:
    def loss(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return getattr(F, name)(model.second(hidden), F.one_hot(labels, 5).float())

    step = step_of(Model(loss))
    assert batch_placement(step).conflicts == ()
    assert set(outputs(step).values()) == {PARTIAL}


def test_a_term_on_weights_is_shared_out() -> None:
    def loss(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return classes(model, hidden, labels) + 0.1 * model.second.weight.square().sum()

    result = placed(loss)
    assert not result.conflicts
    assert "aten.add.Tensor" in {str(node.target) for node, _ in result.shared}


def test_batch_norm_splits_over_data_and_not_over_time() -> None:
    step = step_of(Model(classes, nn.BatchNorm1d(8)))
    limits = split_limits(step)
    assert limits.microbatches is not None
    assert "batch_norm" in limits.microbatches.op
    assert limits.data is None


def test_batch_norm_with_running_statistics_splits() -> None:
    assert placed(classes, nn.BatchNorm1d(8).eval()).conflicts == ()


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 8)])
def test_norms_within_an_example_split(make: Callable[[], nn.Module]) -> None:
    assert placed(classes, make()).conflicts == ()


def test_statistics_spelled_out_need_an_all_reduce() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    result = placed(classes, Centred())
    assert not result.conflicts
    assert result.reduced
    assert all(n.meta["phase"] in ("forward", "backward") for n in result.reduced)


def test_a_sum_of_what_was_summed_already_is_not_summed_again() -> None:
    class Relative(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts = x.sum(0)
            total = counts.sum()
            return x * (counts + 0.1) / (total + 0.1)

    result = placed(classes, Relative())
    assert result.reduced
    assert all(result.places[n] == PARTIAL for n in result.reduced)


MIXING = {
    "contrastive": lambda m, h, y: F.cross_entropy(h @ h.T, y.clamp(max=7)),
    "roll": lambda m, h, y: (h - h.roll(1, 0)).square().sum(),
    "flip": lambda m, h, y: (h * h.flip(0)).sum(),
    "sort": lambda m, h, y: h.sort(0).values[0].sum(),
    "softmax": lambda m, h, y: h.softmax(0).square().sum(),
    "cumsum": lambda m, h, y: h.cumsum(0).square().sum(),
    "maximum": lambda m, h, y: h.max(),
    "halves": lambda m, h, y: (h[:4] * h[4:]).sum(),
    "numbered": lambda m, h, y: (h * torch.arange(h.shape[0])[:, None]).sum(),
    "diagonal": lambda m, h, y: h[(rows := torch.arange(h.shape[0])), rows].sum(),
    "identity": lambda m, h, y: (h * torch.eye(h.shape[0])[:, :1]).sum(),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_examples_runs_once_on_the_whole_batch(name: str) -> None:
    step = step_of(Model(MIXING[name]))
    for over_time in (False, True):
        found = batch_placement(step, over_time=over_time)
        assert not found.conflicts
        assert found.head or found.hoisted
        assert not any("addmm" in str(n.target) for n in found.head)
    assert split_limits(step) == Limits(head=split_limits(step).head)


def test_mixing_ahead_of_the_weights_is_refused() -> None:
    class Rolled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.roll(1, 0)

    limits = split_limits(step_of(Model(classes, Rolled())))
    assert limits.data is not None
    assert limits.data.op == "aten.roll.default"
    assert limits.data.module == "norm"
    assert limits.data.reason.endswith("what follows holds 45% of the model's parameters")


def test_a_constant_size_that_the_batch_fills_is_refused() -> None:
    # Of 8 examples and of 4 the first dim is 2: half of the batch is no half of that dim.
    def halves(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        summed = hidden.view(2, -1, 4).cumsum(1).reshape(hidden.shape)
        return F.cross_entropy(model.second(summed), labels)

    found = placed(halves).conflicts
    assert found[0].node.target is torch.ops.aten.reshape.default
    assert "same size for every batch" in found[0].reason


def test_rows_found_by_their_number_split() -> None:
    """`h[arange(b), labels]`: row r of the result needs row r of h."""

    def loss(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = model.second(hidden)
        return -scores[torch.arange(scores.shape[0]), labels].sum()

    step = step_of(Model(loss))
    assert batch_placement(step).conflicts == ()
    assert set(outputs(step).values()) == {PARTIAL}


def test_parameters_are_replicated() -> None:
    step = step_of(Model(classes))
    places = batch_placement(step).places
    nodes = [n for n in step.graph.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(nodes, step.inputs, strict=True):
        assert places[node] == (REPLICATED if spec.kind == "parameter" else 0)


@pytest.mark.parametrize("name", [n for n, entry in ZOO.items() if not entry.mixes_rows])
def test_the_zoo_splits(name: str, captured: Callable[[str], StepGraph]) -> None:
    assert split_limits(captured(name)) == Limits()


BATCH = sympy.Symbol("b")


def _reshaped(order: Sequence[int], ends: Sequence[int], x: Tensor) -> Tensor:
    """Permutes a tensor, merges runs of its dims, does something, and goes back the same way."""
    turned = x.permute(*order)
    edges = [0, *ends, x.dim()]
    groups = [turned.shape[a:b] for a, b in pairwise(edges) if b > a]
    merged = (turned * 2).reshape([prod(g) for g in groups]).cos()
    back = merged.reshape(turned.shape) + turned
    return back.permute(*(order.index(d) for d in range(x.dim()))).reshape(x.shape[0], -1)


def _traced(function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> fx.Graph:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(*shape)
    return make_fx(function)(x).graph


@settings(deadline=None, max_examples=60)
@given(
    order=st.permutations(range(4)),
    ends=st.lists(st.integers(1, 3), max_size=3, unique=True).map(sorted),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_a_part_computes_what_its_placement_says(
    order: list[int], ends: list[int], sizes: tuple[int, ...]
) -> None:
    """Of every value, also where the batch stands inside a merged dim."""
    run = partial(_reshaped, order, ends)
    whole, half = _traced(run, (4, *sizes)), _traced(run, (2, *sizes))
    for node, smaller in zip(whole.nodes, half.nodes, strict=True):
        if node.op != "output":
            shapes = zip(node.meta["val"].shape, smaller.meta["val"].shape, strict=True)
            node.meta["dims"] = tuple(n if n == m else n // 4 * BATCH for n, m in shapes)
    found = place_batch(whole, {next(iter(whole.nodes)).name: 0}, BATCH, 4, frozenset())
    assert not found.conflicts
    x = torch.arange(4.0 * prod(sizes)).reshape(4, *sizes)
    all_values, part_values = _values(whole, x), _values(half, x[2:])
    for node, smaller in zip(whole.nodes, half.nodes, strict=True):
        if node.op == "output":
            continue
        place = found.places[node]
        dim, outer = (place.dim, place.outer) if isinstance(place, Shard) else (place, 1)
        value = all_values[node.name]
        sections = value.unflatten(dim, (outer, 2, value.shape[dim] // outer // 2))
        own = sections.select(dim + 1, 1).flatten(dim, dim + 1)
        assert torch.equal(own, part_values[smaller.name])


def _values(graph: fx.Graph, x: Tensor) -> dict[str, Tensor]:
    """Every value of a graph, by name."""
    found: dict[str, Tensor] = {}

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found[n.name] = super().run_node(n)
            return found[n.name]

    Noting(fx.GraphModule(torch.nn.Module(), graph)).run(x)
    return found
