"""Placements of the graphs that a deep model is made of, told from those of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import fx

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.model import without_data
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.ir.replication.layers import KEPT, among
from graphaccel.ir.text import graph_text
from graphaccel.passes.microbatch.exact_microbatch import exact_microbatch
from graphaccel.planner.placement import solve_axes as module
from graphaccel.planner.placement.solve_axes import Request, Transfer, solve_axes
from graphaccel.planner.plan.plan import Plan
from graphaccel.planner.search.bounds import over_parameters
from graphaccel.planner.search.candidates import Layout
from graphaccel.sharding.rules.shard import Shard
from graphaccel.sharding.rules.solution import Placements
from graphaccel.sharding.solve.placements import solve_placements
from graphaccel.sharding.solve.transfer_placements import transferred_placements
from tests.passes.steps.test_repeat_layers import LAYERS, captured


@pytest.fixture(scope="module")
def deep() -> StepGraph:
    return captured(LAYERS)


@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}], ids=str
)
def test_told_is_what_solving_finds(
    axes: dict[str, int], deep: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deep.repeats is not None
    few, plan = deep.repeats, Plan(4, batch=8, **axes)  # of 16 some weights may lie in two ways
    more, less = (
        exact_microbatch(step, plan, deep.sizes).graph for step in (few.longer[0], few.short)
    )
    (run,) = among(few.runs, (KEPT,))
    request = Request(plan)
    solved = solve_axes(more, few.longer[0], request)
    deeper = Transfer(solved, few.longer[0].inputs, run, 1)
    assert set(solved.placed) == set(axes)
    wanted = solve_axes(less, few.short, request).local
    monkeypatch.setattr(module, "solve_placements", None)  # copied, then, or this fails
    copied = solve_axes(less, few.short, request, deeper)
    told = copied.local
    assert graph_text(told.graph.graph) == graph_text(wanted.graph.graph)
    assert (told.parameter_shards, told.partial) == (wanted.parameter_shards, wanted.partial)
    shorter = Transfer(copied, few.short.inputs, run, -1)
    again = solve_axes(more, few.longer[0], request, shorter).local
    assert graph_text(again.graph.graph) == graph_text(solved.local.graph.graph)


@pytest.fixture(scope="module")
def encoder_decoder() -> StepGraph:
    """T5-11B's sizes: in small ones messages cost as much as work, and too much is equally good."""
    config = transformers.T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=65536, num_layers=8, num_heads=128,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    fake = without_data(model)
    with next(fake.parameters()).fake_mode:
        ids = torch.empty(8, 512, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.empty_like(ids)}
    step = capture(fake, flatten_call((), batch), many=4)
    assert step.repeats is not None
    assert len(step.repeats.runs) == 2
    return step


@pytest.mark.release
@pytest.mark.parametrize("axes", [{"tensor": 4}, {"context": 2}], ids=str)
def test_an_encoder_and_a_decoder_are_placed_once(
    axes: dict[str, int],
    encoder_decoder: StepGraph,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What all layers of the decoder read of the encoder is placed exactly, and for all depths
    from one graph of few layers."""
    plan, solved = Plan(4, batch=512, **axes), []

    def solve(*args: Any, **kwargs: Any) -> Placements:
        solved.append(solve_placements(*args, **kwargs))
        return solved[-1]

    monkeypatch.setattr(module, "solve_placements", solve)
    with caplog.at_level("INFO", "graphaccel"):
        found = sharded_graph(encoder_decoder, plan)
    assert not [m for m in caplog.messages if m]
    assert len(solved) == 1
    assert not solved[0].guessed
    assert found.lines is not None
    assert len(found.lines.of) > 1.5 * len(found.lines.nodes)


def test_nothing_is_told_where_it_is_not_plain(deep: StepGraph) -> None:
    assert deep.repeats is not None
    few, plan = deep.repeats, Plan(2, batch=16, context=2)
    longer, short = few.longer[0], few.short
    more = exact_microbatch(longer, plan, deep.sizes).graph
    less = exact_microbatch(short, plan, deep.sizes).graph
    (run,) = among(few.runs, (KEPT,))
    graph, known = solve_axes(more, longer, Request(plan)).placed["context"]

    def told(placed: Placements = known, less: fx.GraphModule = less) -> Placements | None:
        return transferred_placements(
            placed, graph, longer.inputs, less.graph, short.inputs, run, 1
        )

    assert told() is not None
    assert told(placed=replace(known, guessed=(next(iter(known.rows)),))) is None
    smaller = exact_microbatch(short, replace(plan, microbatches=2), deep.sizes).graph
    assert told(less=smaller) is None  # other sizes
    last = [n for n in known.rows if n.meta.get("module") == "blocks.1" and n.op != "placeholder"]
    ahead = [n for n in last if n.meta["phase"] == "forward"][-1]  # what the next layer reads
    apart = replace(known.rows[ahead], outputs=(Shard(1),))
    assert told(placed=replace(known, rows={**known.rows, ahead: apart})) is None


def test_context_divides_no_parameter() -> None:
    known = Layout(tensor=2)
    assert over_parameters(Layout(tensor=2, context=8), known) == 1
    assert over_parameters(Layout(tensor=8, context=8), known) == 4
    assert over_parameters(Layout(tensor=4, context=2, expert=3), known) == 6
