"""Plans whose decisions can not be, given as an object and as a file: class, full text, no change."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.arguments import read_plan
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.ir.program import Sharded
from graphaccel.planner.cluster.catalogue import cluster
from graphaccel.planner.plan.plan import Plan, Precision
from tests.support.small import WIDTH, small_batch
from tests.support.untouched import refused


class Blocks(nn.Module):
    """Two blocks that are alike, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x, y)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return graphaccel.plan(Blocks(), small_batch(), devices=1)


def _given(
    plan: Plan | Path, kind: type[errors.GraphAccelError], text: str, model: nn.Module
) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    with refused(kind, text, model, optimizer):
        graphaccel.optimize(model, optimizer, plan=plan, example_batch=small_batch())


def _says(path: str, said: str, why: str, pinned: str = "") -> str:
    pinned = f"  help: pinned, it is one of:  {pinned}\n" if pinned else ""
    return f"""\
error[GA202]: plan `{path}` says {said}, which can not be planned
  why:  {why}
  help: make a new one:  graphaccel plan FILE --devices N --json {path}
{pinned}  explain: graphaccel explain GA202"""


PLACED = (("blocks.2.weight", (Sharded("data", 0),)),)
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"zero": 9}, "zero=9", "it is a level of ZeRO", "zero=0  zero=1  zero=2  zero=3"),
    ({"zero": 1}, "zero=1", "with data=1 there is no axis to shard over", "zero=0"),
    ({"data": 2}, "data=2", "1 devices can not be shared evenly by 2", "data=1"),
    ({"microbatches": 0}, "microbatches=0", "it is a count of at least 1", ""),
    ({"bucket_bytes": -1}, "bucket_bytes=-1", "it is a count of at least 1", ""),
    ({"loss_chunk": -1}, "loss_chunk=-1", "it is a count of at least 1", ""),
    ({"devices": 0}, "devices=0", "it is a count of at least 1", ""),
    ({"batch": 0}, "batch=0", "it is a count of at least 1", ""),
    ({"accumulation": "moon"}, "accumulation='moon'", "unknown", "accumulation='whole'  accumulation='shards'"),
    ({"compile": "bar"}, "compile='bar'", "unknown", "compile='off'  compile='inductor'"),
    ({"outputs": "none"}, "outputs='none'", "unknown", "outputs='loss'  outputs='all'"),
    ({"fallback": "eager"}, "fallback='eager'", "unknown", "fallback='error'  fallback='fx'"),
    ({"reshard_after_forward": "once_per_step"}, "reshard_after_forward='once_per_step'", "with zero=0 no parameter is gathered", "reshard_after_forward='always'"),
    ({"reshard_after_forward": "twice"}, "reshard_after_forward='twice'", "unknown", "reshard_after_forward='always'  reshard_after_forward='once_per_step'  reshard_after_forward='never'"),
    ({"cast_once": True}, "cast_once=True", "with precision=fp32 no parameter is cast", "cast_once=False"),
    ({"scatter_sends": True}, "scatter_sends=True", "with tensor=1 there is nothing to send in parts", "scatter_sends=False"),
    ({"interleave": 2}, "cuts=()", "0 cuts make 1 stages, not 2", ""),
    ({"cuts": ("nowhere",)}, "cuts=('nowhere',)", "1 cuts make 2 stages, not 1", ""),
    ({"schedule": "gpipes"}, "schedule='gpipes'", "unknown", "schedule='gpipe'  schedule='1f1b'  schedule='interleaved'  schedule='zero_bubble'"),
    ({"offload": ("none",)}, "offload=('none',)", "unknown", "offload='none'  offload='optimizer'  offload='activations'  offload='optimizer+activations'  offload='optimizer+parameters'  offload='optimizer+parameters+activations'"),
    (
        {"precision": Precision("int8")},
        "precision=Precision(compute='int8', stream='float32', parameter='float32', reduce='float32', matmul='', scaled=False)",
        "it has no name",
        "precision='fp32'  precision='bf16'  precision='bf16-params'  precision='fp16'  precision='tf32'  precision='fp8'",
    ),
    ({"rates": (("tensor", (1.0,)),)}, "rates=(('tensor', (1.0,)),)", "it has flops, memory, launch, bandwidth, latency of each of: no axis", ""),
    # Against the graph.
    ({"recompute": ("nope",)}, "recompute=('nope',)", "nope is no block; blocks: blocks.0, blocks.1", "recompute='none'  recompute='some'  recompute='selective'  recompute='all'"),
    ({"ort": ("nope",)}, "ort=('nope',)", "no op belongs to nope", "ort='off'  ort='auto'  ort='all'"),
    ({"placements": PLACED}, f"placements={dict(PLACED)!r}", "no parameter or module is called blocks.2.weight; there is blocks.1.0.weight", ""),
    ({"placements": (("blocks.1.0.weight", (Sharded("data", 0, 3),)),)}, "placements={'blocks.1.0.weight': (Sharded(axis='data', dim=0, outer=3),)}", "dim 0 of blocks.1.0.weight has no 3 equal sections", ""),
    ({"loss_chunk": 64}, "loss_chunk=64", "the graph has no fused head and loss, which fusions= asks for", ""),
    ({"fusions": ("gelu_tanh", "attention")}, "fusions=('gelu_tanh', 'attention')", "of these, a plan with tensor=1 places: attention, gelu_tanh", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said", "why", "pinned"), BAD, ids=[",".join(b[0]) for b in BAD]
)
def test_decisions_that_can_not_be(
    changes: dict[str, Any], said: str, why: str, pinned: str, plan: Plan
) -> None:
    _given(replace(plan, **changes), errors.BadPin, _says("plan", said, why, pinned), Blocks())


@pytest.mark.parametrize(
    ("changes", "said", "why"),
    [
        ({"zero": 1}, "zero=1", "with data=1 there is no axis to shard over"),
        ({"recompute": ["nope"]}, "recompute=('nope',)", "nope is no block; blocks: blocks.0, blocks.1"),
    ],
)  # fmt: skip
def test_files_with_decisions_that_can_not_be(
    changes: dict[str, Any], said: str, why: str, plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**json.loads(plan.to_json()), **changes}))
    pinned = next(pinned for _, _, reason, pinned in BAD if reason == why)
    _given(file, errors.BadPin, _says(str(file), said, why, pinned), Blocks())


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"zero": "3"}, "zero is '3', not int"),
        ({"microbatches": True}, "microbatches is True, not int"),
        ({"sequence": 1}, "sequence is 1, not bool"),
        ({"recompute": "all"}, "recompute is 'all', not tuple[str, ...]"),
        ({"offload": "optimizer"}, "offload is 'optimizer', not tuple[str, ...]"),
        ({"batch": 8.0}, "batch is 8.0, not int"),
        ({"notes": (1,)}, "notes is (1,), not tuple[str, ...]"),
    ],
    ids=lambda v: ",".join(v) if isinstance(v, dict) else "",
)
def test_fields_of_another_type(changes: dict[str, Any], wrong: str, plan: Plan) -> None:
    text = f"""\
error[GA407]: plan `plan` can not be read: {wrong}
  help: make a new one:  graphaccel plan FILE --devices N --json plan
  explain: graphaccel explain GA407"""
    _given(replace(plan, **changes), errors.GraphMisuse, text, Blocks())


def test_microbatches_that_do_not_divide_the_batch(plan: Plan) -> None:
    text = """\
error[GA206]: a batch of 8 can not be cut into 3 equal parts (3 microbatches x data 1)
  why:  microbatches of different sizes would change the loss
  help: with data=1 use microbatches= one of:  1, 2, 4, 8
  help: or leave a last, smaller batch out:  DataLoader(dataset, batch_size=..., drop_last=True)
  explain: graphaccel explain GA206"""
    _given(replace(plan, microbatches=3), errors.BatchNotDivisible, text, Blocks())


def test_cuts_that_are_no_nodes() -> None:
    two = graphaccel.plan(Blocks(), small_batch(), devices=2, pipeline=2)
    with pytest.raises(errors.BadPin) as caught:
        read_plan(replace(two, pipeline=1, data=2), {})
    assert str(caught.value) == _says("plan", f"cuts={two.cuts!r}", "1 cuts make 2 stages, not 1")
    compiler = Compiler(
        Model(Blocks(), None, 2.0), cluster("cpu", 2), {}, replace(two, cuts=("x",))
    )
    with pytest.raises(errors.BadPin) as caught:
        compiler.choose(as_batch(small_batch()))
    assert str(caught.value) == _says("plan", "cuts=('x',)", "no node is called x")


def test_a_fusion_that_there_is_not(plan: Plan) -> None:
    with pytest.raises(errors.UnknownFusion):
        graphaccel.optimize(
            Blocks(), plan=replace(plan, fusions=("nope",)), example_batch=small_batch()
        )
