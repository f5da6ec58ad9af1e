"""Fixtures of several folders: captured zoo models, a made-up cluster, a report's facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from graphaccel.capture.batch import as_call, flatten_call
from graphaccel.capture.stepgraph import StepGraph, capture
from graphaccel.compiler.compiler import Compiler
from graphaccel.compiler.model import Model, as_batch
from graphaccel.compiler.profile_graph import sharded_graph
from graphaccel.compiler.program_memory import ProgramMemory
from graphaccel.planner.cluster.cluster import Cluster, Device, Link
from graphaccel.planner.profile.layout_profiles import Layouts, rates_of
from graphaccel.planner.profile.profile import Profile
from graphaccel.planner.search.record import Record
from graphaccel.report.facts import Facts, RankMemory, gather, points, run_spans
from tests.support.captures import captured_once, captures_of


@cache
def _captured(name: str) -> StepGraph:
    from tests.support.zoo import ALL  # imports transformers

    model, batch, loss_fn = ALL[name].build()
    call = flatten_call(*as_call(batch))
    return captured_once(f"graph {name}", lambda: capture(model, call, loss_fn))


@pytest.fixture(scope="session")
def captured() -> Callable[[str], StepGraph]:
    """`captured("gpt")`: the step of a zoo model, captured once a session."""
    return _captured


@pytest.fixture
def shared_captures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of a module share the captures of models that print alike: for modules in which those
    compute alike."""
    with captures_of(request.module.__name__):
        yield


@pytest.fixture(scope="session")
def made_up() -> Callable[..., Cluster]:
    """`made_up(count, kib)`: a cluster of small round numbers, the same on every machine."""

    def make(count: int, kib: int = 16 * 1024) -> Cluster:
        device = Device("made-up", kib << 10, {"float32": 1e10, "bfloat16": 2e10}, 1e9, 1e-6)
        links = (Link("inner", 2e-6, 1e9, 4), Link("outer", 1e-5, 1e8, 64))
        return Cluster(device, count, links, context_bytes=0, fragmentation=0.05)

    return make


REPORTS = {
    "one device": (1, {"recompute": "all"}),
    "pipeline": (4, {"data": 2, "pipeline": 2, "interleave": 1, "microbatches": 4}),
    "interleaved": (2, {"pipeline": 2, "interleave": 2, "microbatches": 4}),
}


@pytest.fixture(scope="session", params=REPORTS)
def facts(request: pytest.FixtureRequest, made_up: Callable[..., Cluster]) -> Facts:
    """Everything a report can hold, of the zoo's gpt under each of REPORTS."""
    from tests.support.zoo import ZOO

    count, pins = REPORTS[request.param]
    where = made_up(count)
    module, batch, loss_fn = ZOO["gpt"].build()
    compiler, record = Compiler(Model(module, loss_fn, 2.0), where, pins), Record()
    chosen = compiler.choose(as_batch(batch), record)
    step, plan, program = chosen.step, chosen.plan, chosen.program
    assert record.outcome is not None
    layouts = compiler.layouts(step)
    made = gather(plan, step, where, model_name="gpt", assumed="AdamW", layouts=layouts)
    memory = ProgramMemory(compiler.model, where, as_batch(batch), plan, program)
    curves = memory.curves(run_spans(made))
    return replace(
        made,
        memory=tuple(RankMemory(rank, samples) for rank, samples in enumerate(curves)),
        candidates=points(record.outcome.seen, plan, where),
    )


GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: the text is that of tests/golden/name.txt."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), "if this is meant: pytest tests --update-golden"

    return check


@pytest.fixture(scope="module")
def profiles(captured: Callable[[str], StepGraph], made_up: Callable[..., Cluster]) -> Layouts:
    """Of the zoo's gpt and of its shards, made once."""
    step, where = captured("gpt"), made_up(4)
    return Layouts(
        Profile(step), lambda plan: sharded_graph(step, replace(plan, rates=rates_of(where, plan)))
    )
