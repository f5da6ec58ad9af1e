"""Pins that contradict one another, the graph or the devices, and what is left of those that do not."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphaccel
from graphaccel import errors
from graphaccel.planner.plan.conflicts import conflict
from tests.support.small import WIDTH, Classifier, small_batch


@pytest.mark.parametrize(
    ("pins", "said", "rows", "why", "names"),
    [
        (
            {"data": 4, "microbatches": 2, "pipeline": 4, "recompute": "none"},
            "data=4 and pipeline=4",
            ("data=4      with the others:  data=2", "pipeline=4  with the others:  pipeline=2"),
            "data 4 x pipeline 4 is 16, not 8 devices",
            "data, pipeline",
        ),
        (
            {"interleave": 2, "schedule": "gpipe", "pipeline": 2},
            "interleave=2 and schedule='gpipe'",
            (
                "interleave=2      with the others:  interleave=1",
                "schedule='gpipe'  with the others:  schedule='interleaved'",
            ),
            "interleave=2 needs a schedule for several stages a rank",
            "interleave, schedule",
        ),
        (
            {"ort": "all", "schedule": "zero_bubble", "pipeline": 2},
            "ort='all' and schedule='zero_bubble'",
            (
                "ort='all'               leave it out",
                "schedule='zero_bubble'  with the others:  schedule='gpipe'  schedule='1f1b'  "
                "schedule='interleaved'",
            ),
            "schedule='zero_bubble' takes the weight gradients out of the backward, and a region "
            "would hold both",
            "ort, schedule",
        ),
        (
            {"zero": 2, "schedule": "zero_bubble", "pipeline": 2},
            "zero=2 and schedule='zero_bubble'",
            (
                "zero=2                  with the others:  zero=0  zero=1",
                "schedule='zero_bubble'  with the others:  schedule='gpipe'  schedule='1f1b'  "
                "schedule='interleaved'",
            ),
            "schedule='zero_bubble' adds gradients up after the backward, and ZeRO 2 and 3 reduce "
            "them inside it",
            "zero, schedule",
        ),
        (
            {"zero": 0, "reshard_after_forward": "once_per_step"},
            "zero=0 and reshard_after_forward='once_per_step'",
            ("zero=0                                 with the others:  zero=3", "reshard_after_forward='once_per_step'  with the others:  reshard_after_forward='always'"),
            "with zero=0 no parameter is gathered",
            "zero, reshard_after_forward",
        ),
        (
            {"accumulation": "shards", "zero": 0},
            "accumulation='shards' and zero=0",
            ("accumulation='shards'  with the others:  accumulation='whole'", "zero=0                 with the others:  zero=2  zero=3"),
            "with zero=0 every device keeps whole gradients",
            "accumulation, zero",
        ),
        (
            {"zero": 1, "reshard_after_forward": "never", "recompute": "none"},
            "zero=1 and reshard_after_forward='never'",
            ("zero=1                         with the others:  zero=3", "reshard_after_forward='never'  with the others:  reshard_after_forward='always'"),
            "with zero=1 no parameter is gathered",
            "zero, reshard_after_forward",
        ),
        (
            {"data": 1, "accumulation": "shards"},
            "data=1 and accumulation='shards'",
            ("data=1                 with the others:  data=2  data=4  data=8", "accumulation='shards'  with the others:  accumulation='whole'"),
            "with data=1 there is no axis to shard over",
            "data, accumulation",
        ),
        (
            {"reshard_after_forward": "never", "data": 1},
            "reshard_after_forward='never' and data=1",
            ("reshard_after_forward='never'  with the others:  reshard_after_forward='always'", "data=1                         with the others:  data=2  data=4  data=8"),
            "with data=1 there is no axis to shard over",
            "reshard_after_forward, data",
        ),
        (
            {"accumulation": "shards", "schedule": "zero_bubble", "pipeline": 2},
            "accumulation='shards' and schedule='zero_bubble'",
            ("accumulation='shards'   with the others:  accumulation='whole'", "schedule='zero_bubble'  with the others:  schedule='gpipe'  schedule='1f1b'  schedule='interleaved'"),
            "schedule='zero_bubble' adds gradients up after the backward, and ZeRO 2 and 3 reduce "
            "them inside it",
            "accumulation, schedule",
        ),
        (
            {"cast_once": True, "reshard_after_forward": "once_per_step", "precision": "bf16"},
            "cast_once=True and reshard_after_forward='once_per_step'",
            ("cast_once=True                         with the others:  cast_once=False", "reshard_after_forward='once_per_step'  with the others:  reshard_after_forward='always'"),
            "reshard_after_forward='once_per_step' is of zero=3, which gathers parameters that are held in shards; cast_once "
            "holds casts of those that are whole, under zero=0, 1 or 2",
            "cast_once, reshard_after_forward",
        ),
        (
            {"reshard_after_forward": "never", "precision": "bf16-params", "data": 4, "cast_once": True},
            "reshard_after_forward='never' and cast_once=True",
            ("reshard_after_forward='never'  with the others:  reshard_after_forward='always'", "cast_once=True                 with the others:  cast_once=False"),
            "reshard_after_forward='never' is of zero=3, which gathers parameters that are held in shards; cast_once "
            "holds casts of those that are whole, under zero=0, 1 or 2",
            "reshard_after_forward, cast_once",
        ),
        (
            {"cast_once": True, "precision": "bf16", "zero": 3, "reshard_after_forward": "always"},
            "cast_once=True and zero=3",
            ("cast_once=True  with the others:  cast_once=False", "zero=3          with the others:  zero=0  zero=1  zero=2"),
            "with zero=3 parameters are gathered; reshard_after_forward='once_per_step' does it once a step",
            "cast_once, zero",
        ),
        (
            {"tensor": 1, "sequence": True},
            "tensor=1 and sequence=True",
            ("tensor=1       with the others:  tensor=2  tensor=4  tensor=8", "sequence=True  with the others:  sequence=False"),
            "with tensor=1 there are no regions of tensor parallelism to shard between",
            "tensor, sequence",
        ),
        (
            {"context": 1, "context_by": "heads"},
            "context=1 and context_by='heads'",
            ("context=1           with the others:  context=2  context=4  context=8", "context_by='heads'  leave it out"),
            "with context=1 no device shares a sequence with another",
            "context, context_by",
        ),
    ],
)  # fmt: skip
def test_pins_that_contradict_each_other(
    pins: dict[str, Any], said: str, rows: tuple[str, ...], why: str, names: str
) -> None:
    with pytest.raises(errors.ConflictingPins) as caught:
        graphaccel.plan(Classifier(), small_batch(), devices=8, **pins)
    lines = "".join(f"  {row}\n" for row in rows)
    assert str(caught.value) == (
        f"error[GA210]: {said} can not be kept together on 8 devices\n{lines}  why:  {why}\n"
        f"  help: leave one of them out, and it will be chosen for you:  {names}\n"
        "  explain: graphaccel explain GA210"
    )


@pytest.mark.parametrize(
    "more", [{}, {"precision": "fp32"}, {"reshard_after_forward": "once_per_step"}], ids=str
)
def test_without_a_lower_precision_nothing_is_cast(more: dict[str, Any]) -> None:
    """The one pin to blame is named: what the others say does not matter."""
    with pytest.raises(errors.BadPin) as caught:
        graphaccel.plan(Classifier(), small_batch(), devices=8, cast_once=True, **more)
    assert str(caught.value) == (
        "error[GA202]: cast_once=True can not be planned\n"
        "  why:  with precision=fp32 no parameter is cast\n"
        "  help: use one of:  cast_once=False\n"
        "  explain: graphaccel explain GA202"
    )


def test_products_that_a_device_does_not_have() -> None:
    """What is no slower there than float32 is named instead, and nothing else."""
    with pytest.raises(errors.BadPin) as caught:
        graphaccel.plan(
            Classifier(), small_batch(), devices=2, device="v100-32gb", precision="tf32"
        )
    assert str(caught.value) == (
        "error[GA202]: precision='tf32' can not be planned\n"
        "  why:  v100-32gb has no matmuls in tfloat32\n"
        "  help: use one of:  precision='fp32'  precision='fp16'\n"
        "  explain: graphaccel explain GA202"
    )


def test_a_loss_outside_of_the_graph_is_not_scaled() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(errors.BadPin) as caught:
        graphaccel.plan(
            model, torch.ones(4, WIDTH), devices=1, device="v100-32gb", precision="tf32"
        )
    assert caught.value.allowed == ("fp32",)
    with pytest.raises(errors.BadPin) as caught:
        graphaccel.plan(
            model, torch.ones(4, WIDTH), devices=2, reshard_after_forward="once_per_step"
        )
    assert str(caught.value) == (
        "error[GA202]: reshard_after_forward='once_per_step' can not be planned\n"
        "  why:  with a loss outside of the graph nothing is in shards; loss_fn= puts it inside\n"
        "  help: use one of:  reshard_after_forward='always'\n"
        "  explain: graphaccel explain GA202"
    )


@pytest.mark.parametrize(
    ("pins", "zeros"),
    [
        ({"reshard_after_forward": "once_per_step"}, (3,)),
        ({"reshard_after_forward": "never"}, (3,)),
        ({"accumulation": "shards", "microbatches": 2}, (2, 3)),
        ({"sequence": True}, (0,)),
        ({"reshard_after_forward": "always"}, (0,)),
        ({"accumulation": "whole"}, (0,)),
    ],
)
def test_what_is_pinned_is_what_is_planned(pins: dict[str, Any], zeros: tuple[int, ...]) -> None:
    """A pin that only a level of ZeRO has asks for it; one that is so anyway asks for nothing."""
    plan = graphaccel.plan(
        Classifier(), small_batch(), devices=4, device="h100-80gb", pipeline=1, **pins
    )
    assert {name: getattr(plan, name) for name in pins} == pins
    assert plan.zero in zeros


@given(
    st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=1, max_size=3), max_size=4),
    st.frozensets(st.sampled_from("abcdef")),
)
def test_the_conflicting_set_is_minimal(bad: list[frozenset[str]], pinned: frozenset[str]) -> None:
    """`bad`: sets of pins that can not be together; any superset of one can not be either."""

    def check(pins: Any) -> errors.GraphAccelError | None:
        return errors.GraphAccelError() if any(b <= set(pins) for b in bad) else None

    pins = dict.fromkeys(sorted(pinned), 1)
    if check(pins) is None:
        return
    found = conflict(pins, check)
    assert check(dict.fromkeys(found)) is not None
    for name in found:
        assert check({other: 1 for other in found if other != name}) is None
