"""Moments of the optimizer lie in large pages of the host, and are tensors like any other."""

from __future__ import annotations

import copy
import io
import sys

import pytest
import torch
from torch import Tensor, nn

from graphaccel.runtime.host_memory.large_pages import LARGE, zeros_like_all
from graphaccel.runtime.parameters.optimizer_step import OptimizerStep


def flags_at(address: int) -> set[str]:
    """What Linux says of the mapping that an address is in: "hg" where large pages are asked for
    (proc_pid_smaps(5))."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            name, *rest = line.split()
            if name == "VmFlags:" and inside:
                return set(rest)
            if "-" in name and not name.endswith(":"):
                start, end = (int(part, 16) for part in name.split("-"))
                inside = start <= address < end
    return set()


linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")


def large(count: int = 3) -> list[Tensor]:
    return [torch.ones(LARGE // 8 + 3, dtype=torch.float32) for _ in range(count)]


@linux
def test_large_pages_are_asked_for() -> None:
    for made in zeros_like_all(large()):
        assert "hg" in flags_at(made.data_ptr())
        assert made.data_ptr() % 64 == 0


@linux
def test_not_for_what_fits_into_caches() -> None:
    (made,) = zeros_like_all([torch.ones(LARGE // 4 - 16)])
    assert "hg" not in flags_at(made.data_ptr())


def test_zeros_of_their_own() -> None:
    """Other shapes and dtypes, one without numbers; what is written to one is in no other."""
    likes = [*large(), torch.ones(5, 0), torch.ones(3, 7, dtype=torch.bfloat16), torch.ones(())]
    made = zeros_like_all(likes)
    for like, zero in zip(likes, made, strict=True):
        assert (zero.shape, zero.dtype, zero.stride()) == (like.shape, like.dtype, like.stride())
        assert not zero.any()
        assert zero.untyped_storage().nbytes() == like.untyped_storage().nbytes()
    for number, zero in enumerate(made):
        zero.fill_(number + 1)
    assert all(bool((zero == n + 1).all()) for n, zero in enumerate(made))


def test_what_they_lie_in_lives_as_long_as_one_of_them() -> None:
    kept = zeros_like_all(large())[1]
    for _ in range(3):
        zeros_like_all(large())[0].fill_(7)
    assert not kept.any()


def test_one_is_saved_alone() -> None:
    one = zeros_like_all(large())[1].fill_(2)
    file = io.BytesIO()
    torch.save(one, file)
    assert file.tell() < 1.1 * one.nbytes
    file.seek(0)
    assert torch.equal(torch.load(file), one)
    assert torch.equal(copy.deepcopy(one), one)


@linux
@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_steps_are_those_of_torch(kind: str) -> None:
    """Of two groups, the second of which gets its gradients a step later."""
    ends = []
    for ours in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=generator)) for n in (LARGE // 4, 5)]
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
        optimizer: torch.optim.Optimizer
        if kind == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        else:
            optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True)
        if ours:
            OptimizerStep(optimizer).start()
        for number in range(3):
            for p in params[: 1 + number]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        assert ("hg" in flags_at(moments[0].data_ptr())) == ours
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
