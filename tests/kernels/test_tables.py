"""Tables of pointers are those of the tensors that are given, whatever was there before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graphaccel.kernels.multi_tensor import tables
from graphaccel.kernels.multi_tensor.steps import AdamRule, MultiTensor
from graphaccel.kernels.multi_tensor.triton_kernels import CHUNK


class Launches:
    """In the place of a kernel: the tables that it is given."""

    def __init__(self) -> None:
        self.lines: list[Tensor] = []
        self.chunks: list[Tensor] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*arguments: Any, **_: Any) -> None:
            chunks = next(a for a in arguments if a.dtype == torch.int32)
            assert grid == (len(chunks),)
            self.lines.append(arguments[0])
            self.chunks.append(chunks)

        return launched


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    for name in ("squares_kernel", "adam_kernel"):
        monkeypatch.setattr(tables, name, found)
    kinds = SimpleNamespace(float32="float32", float64="float64", bfloat16="bfloat16")
    monkeypatch.setattr(tables, "tl", kinds)  # Triton may not be here
    return found


def test_a_part_of_a_tensor_is_not_taken_for_the_whole(launches: Launches) -> None:
    """As after `p.data = p.data[:n]`, or with memory that is used again for another tensor."""
    many, whole = MultiTensor(kernels=True), torch.zeros(CHUNK + 7)
    for some in (whole, whole[:10], whole):
        many.squares([some])
    assert [line[0, -1].item() for line in launches.lines] == [CHUNK + 7, 10, CHUNK + 7]
    assert [c.tolist() for c in launches.chunks] == [[[0, 0], [0, 1]], [[0, 0]], [[0, 0], [0, 1]]]


def test_a_step_after_a_parameter_was_cut(launches: Launches) -> None:
    whole = [torch.zeros(CHUNK + 7) for _ in range(4)]
    rule = AdamRule(0.1, 0.9, 0.99, 1e-8, 0.0, True)
    many = MultiTensor(kernels=True)
    for size in (CHUNK + 7, 10):
        part = [[t[:size]] for t in whole]
        many.adam(*part, [torch.zeros(())], [rule])
    assert [line[0, -1].item() for line in launches.lines] == [CHUNK + 7, 10]
    assert [len(c) for c in launches.chunks] == [2, 1]


def test_a_table_is_made_once(launches: Launches) -> None:
    """What is sent to a device is sent again only where something changed."""
    many, some = MultiTensor(kernels=True), [torch.zeros(5), torch.zeros(9)]
    for _ in range(3):
        many.squares(some)
    assert len({id(line) for line in launches.lines}) == 1
    many.squares([some[0], torch.zeros(9, dtype=torch.bfloat16)])
    assert [line.shape[0] for line in launches.lines[3:]] == [1, 1]
