"""What scripts do besides stepping, where state, gradients and parameters are sharded.

Each job runs the same training on one process in eager mode and under the plan, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphaccel
from graphaccel import replicate, shard
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.gloo.scripts.test_numbers import Dropping, Loud
from tests.gloo.scripts.test_semantics import furthest, gpt, pair, tokens
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import WithLogits, small_batch
from tests.support.zoo import ZOO

pytestmark = pytest.mark.multiprocess

PLANS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"data": 2, "zero": 1}),
    (2, {"data": 2, "zero": 2, "microbatches": 2}),
    (2, {"data": 2, "zero": 3}),
    (2, {"data": 2, "zero": 3, "reshard_after_forward": "once_per_step", "microbatches": 2}),
    (4, {"data": 2, "zero": 3, "pipeline": 2, "microbatches": 2}),
    (4, {"data": 4, "zero": 1, "shard_size": 2}),
    (4, {"data": 4, "zero": 3, "shard_size": 2}),
)
IDS = (
    "zero1", "zero2", "zero3", "zero3-once", "zero3-pipeline2", "zero1-replicated",
    "zero3-replicated",
)  # fmt: skip
BY_MODULE = {
    "data": 2, "zero": 1, "placements": {"blocks.0": shard(0, "data"), "blocks.1": replicate()},
}  # fmt: skip
EVERY = pytest.mark.parametrize(("world", "pins"), PLANS, ids=IDS)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, ShardTensor) else tensor


def _two(build: Any, world: int, pins: Mapping[str, Any], lr: float = 1e-3) -> Any:
    wanted = {"pipeline": 1, "microbatches": 1, "recompute": "none", **pins}
    if wanted["pipeline"] > 1:
        wanted["interleave"] = 1
    return pair(build, wanted, lr, devices=world)


def _furthest_gradient(true: Mapping[str, Tensor], planned: nn.Module) -> float:
    """Largest difference of the gradients of this rank's stages, which has some."""
    got = {
        n: _whole(p.grad)
        for n, p in planned.named_parameters()
        if not isinstance(p, RemoteTensor) and p.grad is not None
    }
    assert got
    return furthest({n: true[n] for n in got}, got)


@captures_of("scripts")
def trained(world: int, pins: Mapping[str, Any]) -> tuple[float, float, float]:
    """Twenty steps with clipping, two groups, a schedule, and accumulation over two batches."""
    plain, first, planned, second = _two(gpt, world, pins)
    clock = [torch.optim.lr_scheduler.StepLR(o, 5, 0.5) for o in (first, second)]
    known = [id(p) for group in second.param_groups for p in group["params"]]
    norms: list[list[float]] = [[], []]
    true: dict[str, Tensor] = {}
    worst = 0.0
    for i, (model, optimizer) in enumerate(((plain, first), (planned, second))):
        for step in range(20):
            for part in range(2):
                (model(**tokens(seed=2 * step + part)) / 2).backward()
            norms[i].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            if step == 0 and model is plain:
                true = {n: p.grad.clone() for n, p in plain.named_parameters()}
            elif step == 0:
                worst = _furthest_gradient(true, planned)
            optimizer.step()
            optimizer.zero_grad()
            clock[i].step()
    assert known == [id(p) for group in second.param_groups for p in group["params"]]
    assert {id(p) for p in second.state} <= set(known)
    apart = max(abs(a - b) for a, b in zip(*norms, strict=True))
    states = furthest(plain.state_dict(), graphaccel.full_state_dict(planned))
    return states, worst, apart


@pytest.mark.parametrize(("world", "pins"), [*PLANS, (2, BY_MODULE)], ids=(*IDS, "by module"))
def test_twenty_steps_are_those_of_one_device(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for states, gradients, norms in pool.run(world, trained, world, pins):
        assert states <= 1e-9
        assert gradients <= 1e-12
        assert norms <= 1e-10


@captures_of("scripts")
def _evaluated(world: int, pins: Mapping[str, Any]) -> tuple[float, float]:
    plain, first, planned, second = _two(lambda: WithLogits().double(), world, pins)
    x, y = small_batch()
    batch = (x.double(), y)
    worst = 0.0
    for _ in range(2):
        for model, optimizer in ((plain, first), (planned, second)):
            model.train()
            model(*batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
        with torch.no_grad():
            worst = max(worst, furthest(plain(*batch), planned(*batch)))
    local = planned.state_dict()
    shapes = [local[n].shape == p.shape for n, p in plain.state_dict().items()]
    assert all(shapes)
    other = WithLogits().double()
    planned.load_state_dict(other.state_dict())  # full tensors into shards
    return worst, furthest(other.state_dict(), graphaccel.full_state_dict(planned))


@EVERY
def test_evaluation_and_loading(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for worst, loaded in pool.run(world, _evaluated, world, pins):
        assert worst <= 1e-12
        assert loaded == 0.0


class Odd(nn.Module):
    """Frozen, unused, borrowed and indivisible parameters, and one that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.wide = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x @ (self.scale * self.wide).T @ self.wide
        return nn.functional.cross_entropy(x @ self.layers[3].weight.detach(), y)


@captures_of("scripts")
def _odd(world: int, pins: Mapping[str, Any]) -> tuple[float, dict[str, str]]:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Odd().double()

    plain, first, planned, second = _two(build, world, pins)
    for model, optimizer in ((plain, first), (planned, second)):
        for step in range(3):
            x, y = small_batch(seed=step)
            model(x.double(), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    whole = dict(planned.graphaccel.program.unsharded)
    return furthest(plain.state_dict(), graphaccel.full_state_dict(planned)), whole


@EVERY
def test_parameters_of_all_kinds(pool: Pool, world: int, pins: dict[str, Any]) -> None:
    for error, whole in pool.run(world, _odd, world, pins):
        assert error <= 1e-9
        assert whole == {"scale": "no dim of [3, 1] can be shared by 2"}


def _arithmetic() -> list[bool]:
    """What a script may do with a sharded parameter, against the same on the whole."""
    plain, _, planned, _ = _two(gpt, 2, {"data": 2, "zero": 3})
    for model in (plain, planned):
        model(**tokens()).backward()
    a = dict(plain.named_parameters())["blocks.0.up.weight"]
    b = dict(planned.named_parameters())["blocks.0.up.weight"]
    assert isinstance(b, ShardTensor)
    assert isinstance(b, nn.Parameter)

    def same(left: Tensor, right: Tensor) -> bool:
        return torch.allclose(left.detach(), _whole(right).detach(), atol=1e-12)

    with torch.no_grad():
        checks = [
            same(a * 2 + a.grad, b * 2 + b.grad),
            same(a.sum(), b.sum()),
            same(a.norm(), b.norm()),
            same(a.abs().max(), b.abs().max()),
            same(a.grad.norm(float("inf")), b.grad.norm(float("inf"))),
            same(a.T @ a, b.T @ b),
            same(a * a[0], b * a[0]),
            bool(torch.isfinite(b).all()),
            same(torch.zeros_like(a), torch.zeros_like(b)),
        ]
        other = torch.randn_like(a)
        for p in (a, b):
            p.mul_(0.5).add_(other)
        checks.append(same(a, b))
    return checks


def test_shards_answer_like_the_whole(pool: Pool) -> None:
    for checks in pool.run(2, _arithmetic):
        assert checks == [True] * len(checks)


@captures_of("scripts")
def _low(pins: Mapping[str, Any], precision: str) -> tuple[float, float, set[torch.dtype]]:
    torch.manual_seed(7)
    model = ZOO["gpt"].build()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    graphaccel.optimize(model, optimizer, devices=2, precision=precision, pipeline=1, **pins)
    losses = []
    for _ in range(15):
        loss = model(**tokens())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = [t for values in optimizer.state.values() for t in values.values()]
    return losses[0], losses[-1], {t.dtype for t in (*model.parameters(), *state)}


@pytest.mark.parametrize(("pins", "precision"), [(PLANS[0][1], "fp16"), (PLANS[2][1], "bf16")])
def test_low_precision_keeps_masters(pool: Pool, pins: dict[str, Any], precision: str) -> None:
    for first, last, kinds in pool.run(2, _low, pins, precision):
        assert last < 0.8 * first
        assert kinds == {torch.float32}


@captures_of("scripts")
def _overflowed() -> tuple[list[bool], list[float]]:
    torch.manual_seed(7)
    model = Loud()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x, _ = small_batch()
    graphaccel.optimize(model, optimizer, devices=2, precision="fp16", data=2, zero=3,
                        pipeline=1)  # fmt: skip
    moved, factors = [], []
    for _ in range(12):
        model(x).backward()
        before = graphaccel.full_state_dict(model)
        optimizer.step()
        optimizer.zero_grad()
        after = graphaccel.full_state_dict(model)
        moved.append(any(not torch.equal(after[n], before[n]) for n in before))
        factors.append(model.graphaccel.loss_scale)
    return moved, factors


def test_an_overflow_skips_the_step_of_every_shard(pool: Pool) -> None:
    first, second = pool.run(2, _overflowed)
    assert first == second
    moved, factors = first
    assert 0 < moved.index(True) < 12
    assert all(moved[moved.index(True) :])
    assert factors[moved.index(True)] < 65536.0


@captures_of("scripts")
def _dropped(zero: int) -> float:
    torch.manual_seed(5)
    model = Dropping().double()
    graphaccel.optimize(model, torch.optim.SGD(model.parameters(), 0.1), devices=2, data=2,
                        zero=zero, pipeline=1, microbatches=1)  # fmt: skip
    x, y = small_batch()
    torch.manual_seed(11)
    loss = model(x.double(), y)
    loss.backward()
    return loss.item() + sum(_whole(p.grad).abs().sum().item() for p in model.parameters())


def test_dropout_is_that_of_the_same_plan_without_shards(pool: Pool) -> None:
    whole = pool.run(2, _dropped, 0)
    for zero in (2, 3):
        assert pool.run(2, _dropped, zero) == pytest.approx(whole, rel=1e-12)


@captures_of("scripts")
def _state(pins: Mapping[str, Any]) -> tuple[set[str], float, float]:
    """Optimizer state: DTensors of the whole shape, and full tensors loaded back."""
    plain, first, planned, second = _two(gpt, 2, pins)
    for model, optimizer in ((plain, first), (planned, second)):
        model(**tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved, true = second.state_dict(), first.state_dict()
    kinds = {type(v).__name__ for s in saved["state"].values() for v in s.values() if v.dim()}
    apart = max(
        (v.full_tensor() - true["state"][i][k]).abs().max().item()
        for i, s in saved["state"].items()
        for k, v in s.items()
        if isinstance(v, DTensor)
    )
    second.load_state_dict(copy.deepcopy(true))  # its steps are counted in tensors of its own
    planned.load_state_dict(plain.state_dict())
    for model, optimizer in ((plain, first), (planned, second)):
        model(**tokens(seed=4)).backward()
        optimizer.step()
    return kinds, apart, furthest(plain.state_dict(), graphaccel.full_state_dict(planned))


@pytest.mark.parametrize("pins", [p for w, p in PLANS if w == 2], ids=IDS[:4])
def test_optimizer_state_is_that_of_the_whole_model(pool: Pool, pins: dict[str, Any]) -> None:
    for kinds, apart, after in pool.run(2, _state, pins):
        assert kinds == {"DTensorPart"}
        assert apart <= 1e-12
        assert after <= 1e-9


REFUSED = """\
error[GA211]: LBFGS does not work on parameters that are spread over devices
  why:  the step must be that of one device, and its step computes the loss anew, by a closure
  help: keep parameters and optimizer state whole:  zero=0, tensor=1, pipeline=1
  explain: graphaccel explain GA211"""


def _refused(own: bool) -> str:
    model = gpt(1)
    optimizer = torch.optim.LBFGS(model.parameters())
    if own:
        optimizer.graphaccel_elementwise = True
    try:
        graphaccel.optimize(model, optimizer, devices=2, data=2, zero=1, pipeline=1,
                            example_batch=tokens())  # fmt: skip
        optimizer.step(lambda: 0.0)
    except graphaccel.GraphAccelError as error:
        return str(error)
    return ""


def test_optimizers_that_need_the_whole_are_refused(pool: Pool) -> None:
    assert pool.run(2, _refused, False) == [REFUSED] * 2
    for text in pool.run(2, _refused, True):
        assert text.startswith(
            "error[GA407]: optimizer.step(closure) where optimizer state is sharded"
        )
