"""The meter against byte counts done by hand, and against the profiler's allocations."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

from graphaccel.runtime.meter import PeakMeter
from tests.support.pool import Pool
from tests.support.zoo import ZOO, call, loss_of

FLOAT = 4


def test_peak_stays_when_storages_are_freed() -> None:
    with PeakMeter() as meter:
        a = torch.empty(100)
        b = a + 1
        assert meter.current == meter.peak == 200 * FLOAT
        del a
        assert meter.current == 100 * FLOAT
        b.mul_(2)
    assert (meter.current, meter.peak) == (100 * FLOAT, 200 * FLOAT)
    assert meter.peak_op == "aten.add.Tensor"


def test_views_and_in_place_results_are_counted_once() -> None:
    outside = torch.ones(64)
    with PeakMeter() as meter:
        x = torch.zeros(10, 10)
        views = [x.t(), x[2:], x.view(100), *x.split(5)]
        x.add_(1)
        outside.add_(1)
        assert meter.current == 100 * FLOAT
        del x
        assert meter.current == 100 * FLOAT
        del views
        assert meter.current == 0
    assert meter.peak == 100 * FLOAT


def test_a_storage_lives_as_long_as_a_view_saved_by_autograd() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    with PeakMeter(resident=[weight]) as meter:
        assert (meter.peak, meter.peak_op) == (64 * FLOAT, "resident")
        loss = (torch.ones(8, 8) @ weight).square().sum()
        del loss
        assert meter.current == 64 * FLOAT


def test_resident_tensors_that_share_a_storage_are_counted_once() -> None:
    x = torch.zeros(100)
    meter = PeakMeter(resident=[x, x.view(10, 10), x[:5]])
    assert meter.current == 100 * FLOAT
    del x
    assert meter.current == 0


def test_other_devices_are_left_out_when_one_is_named() -> None:
    with PeakMeter(device="cuda") as meter:
        torch.ones(10)
    assert meter.peak == 0
    with PeakMeter() as meter:
        torch.ones(10, device="meta")
    assert meter.peak == 0


def test_reset_keeps_what_is_alive() -> None:
    with PeakMeter() as meter:
        kept = torch.zeros(10)
        torch.zeros(50)
        meter.reset_peak()
        assert meter.peak == kept.nbytes


@pytest.mark.parametrize("name", ["gpt", "gpt2", "vit"])
def test_equals_the_profilers_allocations_on_a_training_step(name: str) -> None:
    """The profiler also sees scratch buffers inside operators: a little more, never less."""
    model, batch, loss_fn = ZOO[name].build()
    start = [*model.parameters(), *model.buffers(), *_values(batch)]

    def step() -> None:
        loss_of(call(model, batch), batch, loss_fn).backward()
        model.zero_grad()

    step()
    with PeakMeter(resident=start) as meter:
        resident = meter.current
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    allocations = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for event in sorted(allocations, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    assert most > 0
    assert 0.98 * most <= meter.peak - resident <= most


def _values(batch: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def _collectives() -> dict[str, int]:
    """Peak bytes with 100 floats resident, by name of the collective."""
    ops = torch.ops._c10d_functional
    peaks: dict[str, int] = {}
    x = torch.ones(100)
    world = dist.group.WORLD
    assert world is not None
    with PeakMeter(resident=[x]) as meter:
        dist.all_reduce(x)
        peaks["all_reduce in place"] = meter.peak
        ops.wait_tensor(ops.all_reduce_(x, "sum", world.group_name))
        peaks["functional all_reduce in place"] = meter.peak
        reduced = ops.wait_tensor(ops.all_reduce(x, "sum", world.group_name))
        peaks["functional all_reduce"] = meter.peak
        buffer = torch.empty(200)
        ops.wait_tensor(ops.all_gather_into_tensor_out(x, 2, world.group_name, out=buffer))
        peaks["all_gather into an empty tensor"] = meter.peak
        assert reduced.shape == x.shape
    return peaks


def test_sees_collectives(pool: Pool) -> None:
    expected = {
        "all_reduce in place": 100 * FLOAT,
        "functional all_reduce in place": 100 * FLOAT,
        "functional all_reduce": 200 * FLOAT,
        "all_gather into an empty tensor": 400 * FLOAT,
    }
    assert pool.run(2, _collectives) == [expected, expected]
