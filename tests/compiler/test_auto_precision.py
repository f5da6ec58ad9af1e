"""`precision="auto"`: what is compared, what is taken, and that it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphaccel.compiler.auto_precision import best_precision, precisions_of
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.errors import BadPin
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.plan.prediction import Prediction
from graphaccel.planner.search.record import Record
from tests.support.gpt import GPT

H100 = cluster("h100-80gb", 2)


def test_what_the_device_runs_faster_is_compared() -> None:
    assert precisions_of(H100.device) == ("fp32", "bf16", "bf16-params")
    slow = dict.fromkeys(H100.device.peak_flops, H100.device.peak_flops["float32"])
    assert precisions_of(replace(H100.device, peak_flops=slow)) == ("fp32",)


@pytest.mark.parametrize(
    ("times", "best", "said"),
    [
        ((4.0, 2.0, 1.0), "bf16-params", "4.0 x as fast as fp32, and changes numerics"),
        ((4.0, 2.0, 1.99), "bf16", "2.0 x as fast as fp32"),  # not worth more rounding
        ((1.0, 0.99, 2.0), "fp32", "nothing else is worth changing numerics"),
        ((None, 2.0, None), "bf16", "in fp32 no plan fits"),
    ],
    ids=["fastest", "hardly faster", "slower", "none fits"],
)
def test_the_fastest_that_is_worth_it(
    times: tuple[float | None, ...], best: str, said: str
) -> None:
    seconds = dict(zip(("fp32", "bf16", "bf16-params"), times, strict=True))

    def plan_in(name: str) -> Plan:
        taken = seconds[name]
        if taken is None:
            raise BadPin(pin="precision", value=name, reason="made up")
        return Plan(1, prediction=Prediction(taken, taken, 0.0, 0.0, 0.0))

    name, note = best_precision(H100.device, plan_in)
    assert name == best
    assert note.startswith(f"precision auto: {best}")
    assert said in note


def test_where_nothing_can_be_planned_the_first_reason_is_raised() -> None:
    def refuse(name: str) -> Plan:
        raise BadPin(pin="precision", value=name, reason="made up")

    with pytest.raises(BadPin, match="fp32"):
        best_precision(H100.device, refuse)


def test_the_plan_is_that_of_the_precision_pinned() -> None:
    """Also what the record has, which explains the plan."""
    with torch.device("meta"):
        module = GPT(layers=1, width=128)
        ids = torch.empty(16, 64, dtype=torch.int64)
    batch = as_batch({"input_ids": ids, "labels": torch.empty_like(ids)})
    compiler, record = Compiler(Model(module, None, 2.0), H100, {"precision": "auto"}), Record()
    plan = compiler.choose(batch, record).plan
    others = {
        name: compiler.with_pins({"precision": name}).choose(batch).plan
        for name in ("fp32", "bf16", "bf16-params")
    }
    (name,) = (n for n in others if PRECISIONS[n] == plan.precision)
    assert plan.decided(notes=(), pinned=()) == others[name].decided(notes=(), pinned=())
    times = [p.prediction.seconds for p in others.values() if p.prediction is not None]
    assert plan.prediction is not None
    assert plan.prediction.seconds <= 1.03**2 * min(times)
    assert "precision" not in plan.pinned
    assert plan.notes[0].startswith(f"precision auto: {name}")
    assert record.pins.precision == name
