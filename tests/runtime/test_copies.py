"""Which ranks hold the same weights, and that their digests differ where the weights do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphaccel.ir.program import Sharded
from graphaccel.runtime.copies import EVERY, NUMBERS, SAMPLE, Copies, unequal
from graphaccel.runtime.mesh import Mesh
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.remote import Elsewhere, RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor

SIZES = {"pipeline": 1, "replicate": 2, "shard": 2, "expert": 1, "context": 1, "tensor": 2}
LARGE = SAMPLE  # float32 elements: four times what is read each time


def _ranks(
    change: Callable[[int, torch.Tensor], None], *, times: int = 1, split: str = ""
) -> tuple[int, ...]:
    """The ranks that differ once `change(rank, its part of a weight)` has run on each."""
    numbers = []
    for rank in range(8):
        mesh = Mesh(rank, SIZES)
        weight = torch.arange(float(2 * LARGE)).view(2, LARGE)
        if split:
            layout = ShardLayout(weight.shape, (Sharded(split, 0),), mesh)
            local = layout.own(weight).clone()
            change(rank, local)
            copies = Copies([ShardTensor(local, layout)], mesh)
        else:
            change(rank, weight)
            copies = Copies([weight], mesh)
        for _ in range(times):
            last = copies.numbers()
        numbers.append(last)
    return unequal(numbers)


def _nothing(rank: int, weight: torch.Tensor) -> None: ...


def _first_element(rank: int, weight: torch.Tensor) -> None:
    weight[0, 0] += rank == 6


def _last_element(rank: int, weight: torch.Tensor) -> None:
    weight[-1, -1] += rank == 6


@pytest.mark.parametrize("split", ["", "shard", "tensor", "data"])
def test_equal_weights(split: str) -> None:
    assert _ranks(_nothing, split=split) == ()
    assert _ranks(_nothing, split=split, times=2) == ()


@pytest.mark.parametrize("split", ["", "shard", "tensor"])
def test_a_rank_that_differs(split: str) -> None:
    assert _ranks(_first_element, split=split) == (6,)


def test_what_one_rank_alone_holds() -> None:
    def doubled(rank: int, local: torch.Tensor) -> None:
        if rank == 6:
            local.mul_(2)

    assert _ranks(_first_element, split="data") == ()
    assert _ranks(doubled, split="data") == ()


def test_what_one_rank_alone_writes() -> None:
    numbers = []
    for rank in range(8):
        mesh = Mesh(rank, SIZES)
        layout = ShardLayout(torch.Size((8, 4)), (Sharded("data", 0),), mesh)
        shard = torch.nn.Parameter(ShardTensor(torch.zeros(2, 4), layout))
        copies = Copies([shard], mesh)
        with torch.no_grad():
            shard.add_(1.0)
            torch._foreach_mul_([shard], 2.0)
            assert float(shard.local.sum()) == 16.0
            if rank == 3:
                shard.mul_(1.5)
        numbers.append(copies.numbers())
    assert unequal(numbers) == (3,)


def test_an_element_outside_of_the_sample() -> None:
    assert _ranks(_last_element) == ()
    assert _ranks(_last_element, times=2) == (6,)
    assert _ranks(_last_element, times=3) == ()
    assert _ranks(_last_element, times=EVERY + 2) == (6,)


def test_ranks_of_a_tensor_axis_are_not_compared() -> None:
    def rounds(rank: int, weight: torch.Tensor) -> None:
        weight[0, 0] += rank % 2

    assert _ranks(rounds) == ()


def test_processors_of_other_kinds_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, keys = torch.ones(3), set()
    for kind in ("model name : one\n", "model name : other\n", "model name : other\n"):
        monkeypatch.setattr(Path, "read_text", lambda _, kind=kind: kind)
        keys.add(Copies([weight], Mesh(0, SIZES)).numbers()[0])
    assert len(keys) == 2


def test_weights_are_read_as_they_are() -> None:
    weight = torch.zeros(3, 5).t()
    parameter = torch.nn.Parameter(weight)
    copies = Copies([parameter], Mesh(0, SIZES))
    (key, before, *none) = copies.numbers()
    with torch.no_grad():
        weight[4, 2] = 1.0
    assert none == [0] * (NUMBERS - 2)
    assert copies.numbers()[0] == key
    changed = copies.numbers()[1]
    assert changed != before
    parameter.data = torch.zeros(5, 3)
    assert copies.numbers()[1] == before
    parameter.data = torch.zeros(10, 3)[::2]
    assert copies.numbers()[1] == before


def test_what_other_ranks_hold() -> None:
    elsewhere = Elsewhere(None, (1,), {})
    remote = RemoteTensor(torch.zeros(3), elsewhere)
    assert Copies([remote, torch.empty(0)], Mesh(0, SIZES)).numbers() == [0] * NUMBERS
