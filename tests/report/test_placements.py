"""The placements of a plan as text: by axis and kind of block, what is placed alike on one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphaccel.cli import main as cli
from graphaccel.planner.plan.axis_placements import BlockPlacements
from graphaccel.planner.plan.plan import Plan
from graphaccel.report.placements import placement_lines

BLOCK = BlockPlacements(
    ("blocks.0-11",),
    parameters=(
        ("down.bias", "replicated"),
        ("down.weight", "shard(1)"),
        ("norm.weight", "replicated"),
        ("up.weight", "shard(0)"),
    ),
    forward=(
        ("down: mm", "shard(1), shard(0) -> partial"),
        ("gelu", "shard(1) -> shard(1)"),
        ("up: mm", "replicated, shard(1) -> shard(1)"),
    ),
    backward=(("gelu: gelu_backward", "shard(1), shard(1) -> shard(1)"),),
)
REST = BlockPlacements(("",), parameters=(("head.weight", "replicated"),))
PLAN = Plan(2, tensor=2, axis_placements=(("tensor", (BLOCK, REST)),))

TEXT = """\
PLACEMENTS  what each rank of an axis holds and computes, by kind of block
  tensor 2
    blocks.0-11 (12 blocks)
      parameters  replicated                        down.bias, norm.weight
                  shard(1)                          down.weight
                  shard(0)                          up.weight
      forward     shard(1), shard(0) -> partial     down: mm
                  shard(1) -> shard(1)              gelu
                  replicated, shard(1) -> shard(1)  up: mm
      backward    shard(1), shard(1) -> shard(1)    gelu: gelu_backward
    outside of blocks
      parameters  replicated  head.weight"""


def test_placements_by_kind_of_block() -> None:
    assert "\n".join(placement_lines(PLAN)) == TEXT


def test_names_that_do_not_fit_are_counted() -> None:
    parameters = tuple((f"layer{n}.weight", "shard(0)") for n in range(40))
    kind = BlockPlacements(("blocks.0",), parameters=parameters)
    lines = placement_lines(Plan(2, tensor=2, axis_placements=(("tensor", (kind,)),)))
    assert lines[-1] == (
        "      parameters  shard(0)  layer0.weight, layer1.weight, layer2.weight, layer3.weight "
        "and 36 more"
    )
    assert lines[2] == "    blocks.0 (1 block)"


def test_a_plan_that_shards_no_tensor_has_no_placements() -> None:
    assert placement_lines(Plan(2, data=2)) == []


def test_explain_prints_the_placements_of_a_saved_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    PLAN.save(file)
    assert cli.main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.startswith(TEXT + "\n\n")
