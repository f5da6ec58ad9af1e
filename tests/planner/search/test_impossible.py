"""Numbers that divide, and numbers nearby that would do, without looking at all that there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphaccel.planner.plan.pins import Pins, divisors
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.search.impossible import indivisible, uneven_note


@given(st.integers(1, 3000))
def test_divisors_are_all_there_are(number: int) -> None:
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_divisors_of_many_are_found_soon() -> None:
    assert len(divisors(10**12)) == 13 * 13
    assert divisors(999_999_999_989) == (1, 999_999_999_989)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12))
def test_what_would_do_is_what_is_nearest(count: int, batch: int, stages: int) -> None:
    def possible(devices: int, size: int) -> bool:
        shared = [n for n in range(1, devices + 1) if devices % n == 0 and size % n == 0]
        return any(devices // data <= stages for data in shared)

    def nearest(value: int, most: int) -> list[int]:
        return sorted(range(1, most + 1), key=lambda n: (abs(n - value), n))

    devices = [n for n in nearest(count, 2 * count) if possible(n, batch)][:3]
    batches = [n for n in nearest(batch, 2 * batch + count) if possible(count, n)][:3]
    told = indivisible(count, batch, stages)
    assert told.devices == tuple(sorted(devices))
    assert told.batches == tuple(sorted(batches))


@pytest.mark.parametrize(("count", "batches"), [(2**20, (2**19, 2**20)), (2**20 - 3, (2**20 - 3,))])
def test_of_a_million_devices_what_is_nearest_is_found_soon(
    count: int, batches: tuple[int, ...]
) -> None:
    told = indivisible(count, 7, 2)
    assert told.devices == (2, 7, 14)
    assert told.batches == batches


def test_devices_and_batches_that_would_do_without_a_bubble_are_said() -> None:
    told = Prediction(10.0, 2.0, 1.0, 7.0, 0.0)
    plan = Plan(7, pipeline=7, batch=120, prediction=told)
    assert uneven_note(plan, Pins()) == (
        "the bubble is 70% of the step, as 7 devices can not share a batch of 120: 6 devices "
        "could, or they a batch of 126"
    )
    assert not uneven_note(plan, Pins(pipeline=7))
    assert not uneven_note(replace(plan, batch=126), Pins())
    assert not uneven_note(replace(plan, prediction=replace(told, bubble=1.0)), Pins())
