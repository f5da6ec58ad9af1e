"""Pins, devices and plan files that can not be, through `optimize`: class, full text, no change."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.pins import NAMES
from tests.support.small import CLASSES, WIDTH, Classifier, small_batch
from tests.support.untouched import refused

UNCUT = """\
error[GA206]: a batch of {rows} can not be cut into {parts} equal parts ({parts} microbatches x data 1)
  why:  microbatches of different sizes would change the loss
  help: with data=1 use microbatches= one of:  {allowed}
  help: or leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  explain: graphaccel explain GA206"""

pytestmark = pytest.mark.usefixtures("shared_captures")


class Normed(nn.Module):
    """Batch statistics before the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.norm(x)), y)


def _refuse(
    kind: type[errors.GraphAccelError], text: str, model: Any = None, **settings: Any
) -> None:
    model = model or Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    settings.setdefault("example_batch", small_batch())
    with refused(kind, text, model, optimizer):
        graphaccel.optimize(model, optimizer, **settings)


def _bad_pin(said: str, why: str, advice: str) -> str:
    return f"""\
error[GA202]: {said} can not be planned
  why:  {why}
  help: {advice}
  explain: graphaccel explain GA202"""


@pytest.mark.parametrize(
    ("settings", "said", "why", "advice"),
    [
        (
            {"tensors": 2},
            "tensors=2",
            f"no such decision; there are: {', '.join(NAMES)}",
            "leave tensors out and it will be chosen for you",
        ),
        (
            {"cuda_graphs": "yes"},
            "cuda_graphs='yes'",
            "it is true or false",
            "use one of:  cuda_graphs=True  cuda_graphs=False",
        ),
        (
            {"context_by": "keys"},
            "context_by='keys'",
            "unknown",
            "use one of:  context_by='heads'  context_by='sequence'",
        ),
        (
            {"tensor": 2},
            "tensor=2",
            "1 devices can not be shared evenly by 2",
            "use one of:  tensor=1",
        ),
        (
            {"zero": 4},
            "zero=4",
            "it is a level of ZeRO",
            "use one of:  zero=0  zero=1  zero=2  zero=3",
        ),
        (
            {"zero": 3},
            "zero=3",
            "with data=1 there is no axis to shard over",
            "use one of:  zero=0",
        ),
        (
            {"reshard_after_forward": 1},
            "reshard_after_forward=1",
            "unknown",
            "use one of:  reshard_after_forward='always'  reshard_after_forward='once_per_step'  reshard_after_forward='never'",
        ),
        (
            {"placements": {"outs.weight": graphaccel.shard(0, "data")}},
            "placements={'outs.weight': Sharded(axis='data', dim=0, outer=1)}",
            "no parameter or module is called outs.weight; there is out.weight",
            "leave placements out and it will be chosen for you",
        ),
        (
            {"placements": {"out.weight": graphaccel.shard(2, "data")}},
            "placements={'out.weight': Sharded(axis='data', dim=2, outer=1)}",
            "out.weight is [4, 8]: it has no dim 2",
            "leave placements out and it will be chosen for you",
        ),
        (
            {"placements": {"out.weight": graphaccel.shard(0, "pipeline")}},
            "placements={'out.weight': Sharded(axis='pipeline', dim=0, outer=1)}",
            "a tensor can be sharded over data, expert, context or tensor, not 'pipeline'",
            "leave placements out and it will be chosen for you",
        ),
        (
            {"placements": {"out.weight": graphaccel.shard(0, "tensor")}},
            "placements={'out.weight': Sharded(axis='tensor', dim=0, outer=1)}",
            "out.weight is to be sharded over tensor, which has one device",
            "leave placements out and it will be chosen for you",
        ),
        (
            {"placements": "out.weight"},
            "placements='out.weight'",
            "it maps parameters' names to placements",
            "leave placements out and it will be chosen for you",
        ),
        (
            {"precision": "int8"},
            "precision='int8'",
            "unknown",
            "use one of:  precision='fp32'  precision='bf16'  precision='bf16-params'  precision='fp16'  "
            "precision='tf32'  precision='fp8'  precision='auto'",
        ),
        (
            {"precision": "fp8"},
            "precision='fp8'",
            "matmuls in 8 bits can be planned (`graphaccel plan`), not run yet",
            "use one of:  precision='fp32'  precision='bf16'  precision='bf16-params'  precision='fp16'  "
            "precision='tf32'",
        ),
        (
            {"precision": "tf32"},
            "precision='tf32'",
            "cpu has no matmuls in tfloat32",
            "use one of:  precision='fp32'",
        ),
        (
            {"accumulation": "shards", "zero": 0},
            "accumulation='shards'",
            "with data=1 there is no axis to shard over",
            "use one of:  accumulation='whole'",
        ),
        (
            {"microbatches": 0},
            "microbatches=0",
            "it is a count of at least 1",
            "leave microbatches out and it will be chosen for you",
        ),
        (
            {"devices": "two"},
            "devices='two'",
            "it is a count of at least 1",
            "leave devices out and it will be chosen for you",
        ),
        (
            {"devices": 0},
            "devices=0",
            "it is a count of at least 1",
            "leave devices out and it will be chosen for you",
        ),
        (
            {"recompute": ["blocks.7"]},
            "recompute=('blocks.7',)",
            "blocks.7 is no block; blocks: none",
            "use one of:  recompute='none'  recompute='some'  recompute='selective'  recompute='all'",
        ),
        (
            {"cuts": ["nowhere"]},
            "cuts=('nowhere',)",
            "no node is called nowhere",
            "leave cuts out and it will be chosen for you",
        ),
        (
            {"offload": "disk"},
            "offload='disk'",
            "unknown",
            "use one of:  offload='none'  offload='optimizer'  offload='activations'  "
            "offload='optimizer+activations'  offload='optimizer+parameters'  "
            "offload='optimizer+parameters+activations'",
        ),
        (
            {"offload": "parameters"},
            "offload='parameters'",
            "parameters on the host are stepped there, with their optimizer state",
            "use one of:  offload='optimizer+parameters'  offload='optimizer+parameters+activations'",
        ),
        (
            {"cluster": cluster("h100-80gb", 4)},
            "devices=1",
            "the cluster given as cluster= has 4",
            "use one of:  devices=4",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_pins_that_can_not_be(settings: dict[str, Any], said: str, why: str, advice: str) -> None:
    _refuse(errors.BadPin, _bad_pin(said, why, advice), **settings)


def test_a_plan_with_products_in_8_bits_is_not_run() -> None:
    model, batch = Classifier(), small_batch()
    plan = graphaccel.plan(model, batch, devices=1, device="h100-80gb", precision="fp8")
    text = _bad_pin(
        "precision='fp8'",
        "matmuls in 8 bits can be planned (`graphaccel plan`), not run yet",
        "use one of:  precision='fp32'  precision='bf16'  precision='bf16-params'  precision='fp16'  "
        "precision='tf32'",
    )
    _refuse(errors.BadPin, text, plan=plan)


@pytest.mark.parametrize(
    ("settings", "said", "rows", "why"),
    [
        (
            {"interleave": 2, "pipeline": 1},
            "interleave=2 and pipeline=1",
            "interleave=2  with the others:  interleave=1\n  pipeline=1    leave it out",
            "without a pipeline there is nothing to interleave",
        ),
        (
            {"offload": "activations", "schedule": "zero_bubble"},
            "offload='activations' and schedule='zero_bubble'",
            "offload='activations'   with the others:  offload='none'  offload='optimizer'\n"
            "  schedule='zero_bubble'  with the others:  schedule='gpipe'  schedule='1f1b'  "
            "schedule='interleaved'",
            "schedule='zero_bubble' reads what is saved a second time, for the gradients of "
            "weights, and it would be copied back twice",
        ),
        (
            {"interleave": 2, "schedule": "1f1b"},
            "interleave=2 and schedule='1f1b'",
            "interleave=2     with the others:  interleave=1\n"
            "  schedule='1f1b'  with the others:  schedule='interleaved'",
            "interleave=2 needs a schedule for several stages a rank",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_pins_that_contradict_each_other(
    settings: dict[str, Any], said: str, rows: str, why: str
) -> None:
    text = f"""\
error[GA210]: {said} can not be kept together on 1 device
  {rows}
  why:  {why}
  help: leave one of them out, and it will be chosen for you:  {", ".join(settings)}
  explain: graphaccel explain GA210"""
    _refuse(errors.ConflictingPins, text, **settings)


def test_a_batch_that_can_not_be_cut() -> None:
    text = UNCUT.format(rows=8, parts=3, allowed="1, 2, 4, 8")
    _refuse(errors.BatchNotDivisible, text, microbatches=3)


class Squares(Classifier):
    """The mean of all squares: no row of it can be marked as ignored."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.out(self.inner(x)) - y[:, None]).square().mean()


def test_a_later_batch_that_can_not_be_cut() -> None:
    model = Squares()
    optimizer = torch.optim.AdamW(model.parameters())
    graphaccel.optimize(model, optimizer, microbatches=4)
    model(*small_batch()).backward()
    optimizer.step()
    text = """\
error[GA206]: a batch of 6 can not be cut into 4 equal parts (4 microbatches x data 1), and rows to complete it would change the result
  why:  its loss has no input that marks a row as ignored
  help: leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  help: or use a batch that is a multiple of 4
  explain: graphaccel explain GA206"""
    with refused(errors.BatchNotDivisible, text, model, optimizer):
        model(*small_batch(6))
    model(*small_batch(4)).backward()  # and it goes on


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts CPU cores")
def test_more_devices_than_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    here = 4 * len(os.sched_getaffinity(0))
    text = f"""\
error[GA205]: 9999 devices asked for, {here} available (no CUDA device; 4 processes for each of {here // 4} CPU cores)
  help: use what is here:  devices={here}
  help: to plan for machines you do not have:  graphaccel plan FILE --devices 9999 --device h100-80gb
  explain: graphaccel explain GA205"""
    monkeypatch.setenv("WORLD_SIZE", "9999")
    monkeypatch.setenv("RANK", "0")
    _refuse(errors.TooManyDevices, text, devices=9999)


def test_batch_norm_is_not_microbatched() -> None:
    number = Normed.forward.__code__.co_firstlineno + 1
    text = f"""\
error[GA207]: the batch can not be split over the microbatch axis: aten._native_batch_norm_legit_functional.default in `norm` needs the whole batch
  --> test_bad_input_plan.py:{number}
{number:>5} |         return F.cross_entropy(self.out(self.norm(x)), y)
      |         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  why:  it mixes the examples of a batch, and what follows holds 99% of the model's parameters
  help: keep the batch whole on this axis:  microbatches=1
  explain: graphaccel explain GA207"""
    _refuse(errors.SplitRefused, text, Normed(), microbatches=2)


def _plan_file(folder: Path) -> tuple[str, str]:
    path = str(folder / "plan.json")
    plan = graphaccel.plan(Classifier(), small_batch(), devices=1)
    plan.save(path)
    return path, plan.graph


def _mismatch(path: str, rows: str) -> str:
    return f"""\
error[GA204]: plan `{path}` was made for something else
{rows}
  why:  its predictions and its stage cuts would not hold
  help: make a new one:  graphaccel plan FILE --devices N --json {path}
  explain: graphaccel explain GA204"""


def test_a_plan_of_this_very_model_runs(tmp_path: Path) -> None:
    path, _ = _plan_file(tmp_path)
    model = graphaccel.optimize(Classifier(), plan=path, example_batch=small_batch())
    model(*small_batch()).backward()


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    path, made = _plan_file(tmp_path)
    other = Classifier(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    here = graphaccel.plan(other, small_batch(), devices=1).graph
    text = _mismatch(path, f"         plan              here\n  model  {made}  {here}")
    _refuse(errors.PlanMismatch, text, other, plan=path)


def test_a_plan_of_another_cluster(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    graphaccel.plan(Classifier(), small_batch(), devices=1, device="h100-80gb").save(path)
    text = _mismatch(path, "           plan           here\n  cluster  1 x h100-80gb  1 x cpu")
    _refuse(errors.PlanMismatch, text, plan=path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (
            "{not json",
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
        ("[1, 2]", "it is no plan"),
        ('{"schema": 7}', "plan schema 7; this version reads 2"),
        ('{"schema": 1, "speed": 3}', "unknown fields in plan: speed"),
        ('{"schema": 1}', "it has no field 'prediction'"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    text = f"""\
error[GA407]: plan `{path}` can not be read: {reason}
  help: make a new one:  graphaccel plan FILE --devices N --json {path}
  explain: graphaccel explain GA407"""
    _refuse(errors.GraphMisuse, text, plan=str(path))


def test_pins_beside_a_plan(tmp_path: Path) -> None:
    path, _ = _plan_file(tmp_path)
    why = "the plan given as plan= decides it"
    text = _bad_pin("microbatches=2", why, "leave microbatches out and it will be chosen for you")
    _refuse(errors.BadPin, text, plan=path, microbatches=2)
