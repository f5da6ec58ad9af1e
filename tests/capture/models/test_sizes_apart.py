"""Sizes at which a model is another: a batch of one, an empty one, ops that fix their sizes."""

import linecache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphaccel
from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.symbols import BATCH
from graphaccel.errors import CaptureRefused


class Squeezed(nn.Module):
    """Its output has no dims for a single example, and the loss is then another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x, y):
        found = self.linear(x).squeeze()
        return F.mse_loss(found, y) if found.dim() else (found - y.sum()).abs()


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.function = function

    def forward(self, x, *more):
        return self.function(x * self.scale, *more).sin().sum()


def _equal(model, batches):
    torch.manual_seed(0)
    plain = model().double()
    torch.manual_seed(0)
    ours = graphaccel.optimize(model().double(), devices=1)
    for batch in batches:
        losses = [m(*batch) for m in (plain, ours)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def test_a_batch_of_one_among_others():
    generator = torch.Generator().manual_seed(1)
    batches = [
        tuple(torch.randn(n, *shape, generator=generator).double() for shape in ((4,), ()))
        for n in (6, 1, 3, 1)
    ]
    _equal(Squeezed, batches)


X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda x, i: x[0].index_select(0, i), (X[:1], torch.tensor([2]))),
        (lambda x, i: x.scatter_add(0, i, x[:1]), (X[:1], torch.zeros(1, 5, dtype=torch.int64))),
        (lambda x, v: x.diagonal_scatter(v * x[0, 0]), (X, X[:, 0])),
        (lambda x: torch.linalg.vector_norm(x, 6), (X[0],)),
        (lambda x: x.sum().index_select(0, torch.tensor([0])), (X,)),
        (lambda x: F.kl_div(x.log_softmax(1), X.softmax(1)), (X,)),
    ],
    ids=["index", "scatter", "diagonal", "norm", "no dims", "kl_div"],
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_ops_that_fix_their_sizes(function, batch):
    _equal(lambda: Called(function), [batch])


def test_an_empty_batch_has_no_symbol():
    step = capture(Called(lambda x: x), flatten_call((X[:0],), {}))
    assert BATCH not in step.sizes
    assert capture(Called(lambda x: x), flatten_call((X[:1],), {})).sizes[BATCH] == 1


def test_a_call_that_writes_to_its_input_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            x.mul_(2)
            return (x * self.weight).sum()

    with pytest.raises(CaptureRefused) as caught:
        capture(Writes(), flatten_call((X.clone(),), {}))
    location = caught.value.location
    assert location is not None
    assert linecache.getline(location.file, location.line).strip() == "x.mul_(2)"
    assert caught.value.reason == "it writes to its input `args[0]`, which the script could read"
    assert caught.value.help_line == "let it write to a copy, in forward:  x = x.clone()"


def test_a_loss_added_to_zero_is_a_sum_of_parts():
    """`sum(losses)` and `loss = 0; loss += part` begin with the number 0."""

    class Summed(Called):
        def forward(self, x):
            return sum((x * self.scale * k).sin().sum() for k in (1, 2))

    ours = graphaccel.optimize(Summed(None), devices=1, microbatches=2)
    plain = Summed(None)
    losses = [model(X + 0.3) for model in (ours, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.scale.grad, plain.scale.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.to_sparse().to_dense(), "its result is sparse (torch.sparse_coo); a dense"),
        (
            lambda x: F.embedding(torch.tensor([0, 1]), x, sparse=True),
            "`sparse=True` gives a gradient that is no dense tensor",
        ),
    ],
)
def test_sparse_values_are_refused(function, reason):
    with pytest.raises(CaptureRefused) as caught:
        capture(Called(function), flatten_call((X,), {}))
    assert reason in str(caught.value)
    assert "test_sizes_apart.py" in str(caught.value)
