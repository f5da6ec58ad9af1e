"""What a script does with parameters that are held in shards, or on another pipeline rank, between
steps: every op gives what it gives for whole parameters, or is refused (GA408)."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphaccel
from graphaccel.compat.torch import pytree
from graphaccel.errors import ElsewhereNeeded
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor, ShardView
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess

PLANS: dict[str, dict[str, Any]] = {
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


class Uneven(nn.Module):
    """Sizes that two ranks do not divide. Inputs [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


Parameters = list[Tensor]
"""Weight [7, 5] and bias of the first layer, weight [5, 7] and bias of the second."""


def _others(p: Parameters) -> Parameters:
    """Whole tensors beside the parameters."""
    return [torch.linspace(-1, 1, t.numel()).double().view(t.shape) for t in p]


def _whole_from_shards(p: Parameters) -> Any:
    own = _others(p)
    own[0].lerp_(p[0], 0.1)
    own[1].copy_(p[1])
    own[2].addcmul_(p[2], p[2])
    torch.add(p[3], 1, out=own[3])
    return own


def _lists_into_whole(p: Parameters) -> Any:
    own = _others(p)
    torch._foreach_lerp_(own, p, 0.1)
    torch._foreach_add_(own, p)
    torch._foreach_copy_(own, torch._foreach_mul(p, 2.0))
    return own


def _lists_into_shards(p: Parameters) -> None:
    torch._foreach_lerp_(p, _others(p), 0.1)
    torch._foreach_mul_(p, torch._foreach_add(_others(p), p))
    torch._foreach_clamp_max_(p, 0.3)


def _views(p: Parameters) -> Any:
    p[0][0] = 3.0
    p[0][1:3, 2] += 1
    p[0].t().mul_(2)
    p[2].view(-1)[3:9].zero_()
    p[1].data[:2].fill_(5)
    for row in p[2].unbind():
        row.clamp_(max=0.2)
    kept = p[0].view(-1)
    p[0].add_(1)  # a view shows what is there when it is read
    return kept * 1, p[0].chunk(2), p[2].flatten().sum(), p[0].t() @ p[0]


def _vectors(p: Parameters) -> Any:
    vector = nn.utils.parameters_to_vector(p)
    return vector, nn.utils.get_total_norm(p), torch.cat([t.view(-1) for t in p])


def _norms(p: Parameters) -> Any:
    orders = [0, 1, 2, 3, float("inf"), -float("inf")]
    changed = torch.linalg.vector_norm(p[0])
    changed *= 2
    found = [torch.linalg.vector_norm(t, n) for t in p for n in orders]
    shifted = [torch.linalg.vector_norm(t + 1) for t in p]  # nor does padding count
    return found, shifted, torch._foreach_norm(p), changed, p[0].norm(dim=1)


def _reductions(p: Parameters) -> Any:
    largest = torch._foreach_max(p) if hasattr(torch, "_foreach_max") else [t.max() for t in p]
    return largest, [t.sum() for t in p], p[0].std(), p[0].argmax(), p[2].cumsum(1)


def _stacked(p: Parameters) -> Any:
    signed = torch.stack([t.sum() for t in p])
    return signed, torch.stack([(t * float("nan")).sum() for t in p]).isnan()


def _numbers(p: Parameters) -> Any:
    norms = [t.norm() for t in p]
    kept = [copy.deepcopy(t.norm()) for t in p]
    single = torch.tensor([t.norm() for t in p], dtype=torch.float32)
    corners = torch.as_tensor([t.view(-1)[0] for t in p])
    total = math.sqrt(sum(t.norm() ** 2 for t in p))
    return torch.tensor(norms), kept, single.double(), corners, total, float(p[0].data.norm(2))


def _texts(p: Parameters) -> Any:
    with torch.no_grad():
        return f"{p[0].norm():.9f} {p[0][0, 0]:.9f} {p[1].norm()}", f"{p[2][1, 2]:.9f}"


def _arrays(p: Parameters) -> Any:
    read = [t.detach().numpy() for t in p]
    norms = np.array([t.norm().numpy() for t in p] + [np.asarray(p[2].detach()[0]).sum()])
    counts, _ = np.histogram(p[0].detach().cpu().numpy(), bins=5)
    return (
        [a.tolist() for a in (*read, norms, counts)],
        p[0].tolist(),
        pickle.loads(pickle.dumps(p[1].norm())),
    )


def _equal(p: Parameters) -> Any:
    same = [t.clone() for t in p]
    same[0].view(-1)[-1] += 1  # on the last rank alone
    return [torch.equal(a, b) for a, b in zip(p, same, strict=True)]


def _same_tensor(p: Parameters) -> Any:
    return [torch.equal(a, b) for a in p for b in p if a is b or a.shape != b.shape]


def _random(p: Parameters) -> Any:
    torch.manual_seed(3)
    p[0].normal_()
    return nn.functional.dropout(p[2], 0.5), torch.rand_like(p[1])


def _scaled(p: Parameters) -> Any:
    p[0].view(-1)[0] = float("inf")  # on the first rank alone
    found, scale = torch.zeros(()).double(), torch.tensor(0.5).double()
    torch._amp_foreach_non_finite_check_and_unscale_(p, found.float(), scale.float())
    seen = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(p, seen, scale.float())
    return seen


def _normed_weight(p: Parameters) -> Any:
    return torch._weight_norm(p[0], p[1].view(-1, 1), 0), torch.linalg.svdvals(p[2])


def _copies(p: Parameters) -> Any:
    made = copy.deepcopy(p)
    torch._foreach_mul_(made, 3.0)
    return made


OPS: dict[str, Callable[[Parameters], Any]] = {
    f.__name__.strip("_"): f
    for f in (
        _whole_from_shards, _lists_into_whole, _lists_into_shards, _views, _vectors, _norms,
        _reductions, _stacked, _numbers, _texts, _arrays, _equal, _same_tensor,
        _random, _scaled, _normed_weight, _copies,
    )
}  # fmt: skip
RIGHT_IN_PIPELINES = {"same_tensor", "lists_into_shards", "random", "scaled", "stacked", "copies"}


def _known(result: Any) -> Any:
    """Plain tensors; None for what lies on another rank."""
    if isinstance(result, RemoteTensor):
        return None
    if isinstance(result, ShardView):
        return result.clone()
    return result.whole() if isinstance(result, ShardTensor) else result


@captures_of("tensors elsewhere")
def _differences(pins: dict[str, Any]) -> dict[str, str]:
    torch.manual_seed(0)
    plain, x = Uneven().double(), torch.randn(8, 5).double()
    found = {}
    for name, op in OPS.items():
        mine, planned = copy.deepcopy(plain), copy.deepcopy(plain)
        graphaccel.optimize(planned, devices=2, example_batch=(x,), **pins)
        with torch.no_grad():
            want = op(list(mine.parameters()))
            try:
                got = op(list(planned.parameters()))
            except ElsewhereNeeded as error:
                at = error.location
                found[name] = "refused" if at and at.file == __file__ else "refused nowhere"
                continue
            pairs = [*zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=True)]
            pairs += zip(mine.parameters(), planned.parameters(), strict=True)
            known = [(a, b) for a, b in ((a, _known(b)) for a, b in pairs) if b is not None]
            assert known
            right = all(_same(a, b) for a, b in known)
        found[name] = "equal" if right else "wrong"
    return found


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b)
    return torch.allclose(a, b, rtol=1e-13, atol=1e-13, equal_nan=True) and a.dtype == b.dtype


@pytest.mark.parametrize("plan", PLANS)
def test_ops_on_parameters_between_steps(pool: Pool, plan: str) -> None:
    for found in pool.run(2, _differences, PLANS[plan]):
        if plan == "pipeline":
            right = {name for name, result in found.items() if result == "equal"}
            assert right >= RIGHT_IN_PIPELINES
            assert set(found.values()) == {"equal", "refused"}, found
        else:
            assert set(found.values()) == {"equal"}, found


@captures_of("tensors elsewhere")
def _norms_by_the_help_line(pins: dict[str, Any]) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain, x = Uneven().double(), torch.randn(8, 5).double()
    model = copy.deepcopy(plain)
    graphaccel.optimize(model, devices=2, **pins)
    plain(x).backward()
    model(x).backward()
    with pytest.raises(ElsewhereNeeded) as caught:
        torch.tensor([p.grad.norm() for p in model.parameters()])
    line = str(caught.value).split("read together:  ")[1].split("\n")[0]
    exec(line, found := {"torch": torch, "model": model})
    return [float(p.grad.norm()) for p in plain.parameters()], found["norms"]


def test_norms_of_a_pipeline_are_read_as_the_error_says(pool: Pool) -> None:
    for expected, found in pool.run(2, _norms_by_the_help_line, PLANS["pipeline"]):
        assert found == pytest.approx(expected, rel=1e-12)


@captures_of("tensors elsewhere")
def _norm_after_a_step(pins: dict[str, Any]) -> tuple[list[float], list[float]]:
    """As scripts log it, with and without a test for gradients that are None."""
    torch.manual_seed(0)
    plain, x = Uneven().double(), torch.randn(8, 5).double()
    model = copy.deepcopy(plain)
    found = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        if each is model:
            graphaccel.optimize(model, optimizer, devices=2, **pins)
        norms = []
        for set_to_none in (True, False, True):
            each(x).backward()
            optimizer.step()
            given = [p.grad for p in each.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(given)))
            optimizer.zero_grad(set_to_none=set_to_none)
        found.append(norms)
    return found[0], found[1]


def test_gradients_are_read_after_a_step_as_before_it(pool: Pool) -> None:
    for expected, found in pool.run(2, _norm_after_a_step, PLANS["pipeline"]):
        assert expected[0] != pytest.approx(expected[2], rel=1e-3)
        assert found == pytest.approx(expected, rel=1e-12)
