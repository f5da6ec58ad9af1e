"""Calls of a model written by position and by keyword."""

from __future__ import annotations

from typing import Any

import pytest

from graphaccel.capture.batch import CallNumber
from graphaccel.dispatch.call_form import CallForm


def _forward(x: int, mask: int = 0, *, scale: int = 1, **others: int) -> None:
    pass


Given = tuple[tuple[Any, ...], dict[str, Any]]
CALLS: dict[str, tuple[Given, Given, Given]] = {
    "by keyword, as by position": (((1, 2), {}), ((), {"mask": 4, "x": 3}), ((3, 4), {})),
    "by position, as by keyword": (((), {"x": 1}), ((3,), {}), ((), {"x": 3})),
    "an optional one left out": (((1, 2), {}), ((), {"x": 3}), ((3,), {})),
    "one more": (((1,), {}), ((3, 4), {"scale": 5}), ((3,), {"mask": 4, "scale": 5})),
    "keywords in their first order": (
        ((1,), {"scale": 1, "mask": 2}),
        ((3,), {"mask": 4, "scale": 5}),
        ((3,), {"scale": 5, "mask": 4}),
    ),
    "others": (((1,), {}), ((), {"more": 2, "x": 3}), ((3,), {"more": 2})),
    "one that does not fit": (((1,), {}), ((3, 4, 5), {}), ((3, 4, 5), {})),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_form_of_the_first(name: str) -> None:
    first, later, wanted = CALLS[name]
    form = CallForm(_forward)
    assert form.same(*first) == first
    got = form.same(*later)
    assert got == wanted
    assert list(got[1]) == list(wanted[1])


def test_arguments_without_names_stay() -> None:
    form = CallForm(lambda *args, **kwargs: None)
    assert form.same((1, 2), {"x": 3}) == ((1, 2), {"x": 3})


def test_numbers_that_can_not_be_inputs_stay() -> None:
    form, x = CallForm(_forward), object()
    for step, rate in ((1, 0.5), (2, 0.5), (3, 0.4)):
        (first, second), held = form.with_numbers((x, step), {"rate": rate, "on": True})
        assert first is x
        assert held["on"] is True
        assert held["rate"] == CallNumber("rate", {})
        assert held["rate"].values["rate"] == rate
        assert second == (3 if step == 3 else CallNumber("args[1]", {}))
        form.after_step(["arguments['rate']"])
