"""Batches whose integer matrices have two lengths, as those of an encoder and a decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphaccel.capture.batch import Batch, flatten_call
from graphaccel.capture.stepgraph import capture
from graphaccel.capture.symbols import BATCH, SEQUENCES, evaluate
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of

WORDS, WIDTH = 11, 4


class Translator(nn.Module):
    """`forward(source, target, labels)`: [B, A], [B, T] and [B, T] → loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        read, written = self.words(source), self.words(target)
        scores = written @ read.transpose(1, 2) / source.shape[1] ** 0.5
        attended = written + scores.softmax(-1) @ read
        return F.cross_entropy(self.out(attended).flatten(0, 1), labels.flatten())


class Prefixed(Translator):
    """Attends to source and target as one sequence, whose length is a sum."""

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        whole = self.words(torch.cat([source, target], 1))
        attended = (whole @ whole.transpose(1, 2)).softmax(-1) @ whole
        logits = self.out(attended[:, source.shape[1] :])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def pairs(rows: int, read: int, written: int) -> Batch:
    target = torch.arange(rows * written).view(rows, written) % WORDS
    source = torch.arange(rows * read).view(rows, read) % WORDS
    return flatten_call((source, target, (target + 1) % WORDS), {})


@pytest.mark.parametrize(("read", "written"), [(8, 6), (8, 4), (4, 8), (6, 8)])
def test_one_capture_serves_all_pairs_of_lengths(read: int, written: int) -> None:
    """From the second pair on: many scripts pad to the same lengths in every step."""
    model = Translator()
    captures = Captures(model_of(model, None, None, "cpu"))
    first, _ = captures.of(pairs(4, 7, 5))
    step, _ = captures.of(pairs(4, read, written))
    assert step is not first
    assert captures.of(pairs(6, 7, 5))[0] is step
    for rows, *lengths in ((4, 5, 9), (3, 7, 7), (6, 12, written), (4, read, 3)):
        batch = pairs(rows, *lengths)
        other, sizes = captures.of(batch)
        assert other is step
        assert sizes == {BATCH: rows, **dict(zip(SEQUENCES, lengths, strict=True))}
        fresh = capture(model, batch, None, symbolic=False)
        for node, twin in zip(step.graph.graph.nodes, fresh.graph.graph.nodes, strict=True):
            if isinstance(node.meta.get("val"), Tensor):
                shape = tuple(evaluate(d, sizes) for d in node.meta["dims"])
                assert shape == tuple(twin.meta["val"].shape)


def test_a_first_batch_of_equal_lengths_costs_one_capture_more() -> None:
    captures = Captures(model_of(Translator(), None, None, "cpu"))
    steps = [captures.of(pairs(4, *n))[0] for n in ((8, 8), (6, 6), (5, 9), (9, 5), (7, 7))]
    assert len({id(step) for step in steps}) == 2


def test_a_sum_of_two_lengths_is_captured_for_each_pair() -> None:
    captures = Captures(model_of(Prefixed(), None, None, "cpu"))
    captures.of(pairs(4, 9, 7))
    step, sizes = captures.of(pairs(4, 8, 6))
    assert sizes == {BATCH: 4}
    assert captures.of(pairs(4, 5, 9))[0] is not step
    assert captures.of(pairs(6, 8, 6))[0] is step
