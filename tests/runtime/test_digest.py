"""Batches that differ have other digests, on the host and on a device; equal ones equal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphaccel.compat.torch.modes import TorchDispatchMode
from graphaccel.compat.torch.pytree import tree_leaves
from graphaccel.runtime import digest

WAYS: dict[str, Callable[[Tensor], int]] = {
    "host": lambda t: digest.of_host([t]),
    "device": lambda t: int(digest.of_device([t])),  # the same arithmetic on any device
}
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_number_of_dims(way: str, dtype: torch.dtype) -> None:
    of = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (3,), (5, 7), (2, 3, 4)):
        t = torch.randn(shape, generator=generator).to(dtype)
        assert of(t) == of(t.clone())
        if t.numel():
            other = t.clone()
            other.view(-1)[-1] = ~other.view(-1)[-1] if dtype == torch.bool else t.view(-1)[-1] + 1
            assert of(t) != of(other)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signs_orders_and_places(way: str, dtype: torch.dtype) -> None:
    of = WAYS[way]
    t = torch.randn(300, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = t[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    signs = t.clone()
    signs[:2, :2] *= -1
    far = t.clone()
    far[0, 0], far[-1, -1] = t[-1, -1], t[0, 0]
    smallest = t.clone()
    smallest[100, 100] = torch.nextafter(t[100, 100], t[100, 100] + 1)
    others = [-t, rows, signs, far, smallest, t.flip(0), t.flip(1), t.roll(1)]
    assert len({of(other) for other in (t, *others)}) == 1 + len(others)
    assert of(t.T.contiguous().T) == of(t)  # strides are no values


@pytest.mark.parametrize("way", WAYS)
def test_an_ignored_label_is_no_other(way: str) -> None:
    labels = torch.full((4, 8), -100)
    for other in (99, 100, 0):  # 99 has the bits of -100 inverted
        changed = labels.clone()
        changed[2, 3] = other
        assert WAYS[way](changed) != WAYS[way](labels)


def test_where_bytes_lie_is_no_value() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    shifted = torch.cat([values[:1], values])[1:]
    assert shifted.storage_offset() == 1
    assert WAYS["device"](shifted) == WAYS["device"](values)


class _Largest(TorchDispatchMode):
    """The most bytes that an op's result takes, beside those of `whole`."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.whole, self.most = whole.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if not isinstance(each, Tensor):
                continue
            memory = each.untyped_storage()
            if memory.data_ptr() != self.whole:
                self.most = max(self.most, memory.nbytes())
        return result


def test_a_large_tensor_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading weights takes little of the memory that is left."""
    monkeypatch.setattr(digest, "_ROWS", 2)
    large = torch.ones(1_000_001)
    with _Largest(large) as largest:
        WAYS["device"](large)
    assert 0 < largest.most <= 2 * 8 * digest._WIDTH


def test_texts_and_numbers() -> None:
    assert digest.of_text("a") != digest.of_text("b")
    assert -(2**63) <= digest.of_text("x") < 2**63
    assert digest.of_numbers([0.1, 2]) != digest.of_numbers([0.1, 3])
    assert digest.of_numbers([]) == digest.of_numbers([])
