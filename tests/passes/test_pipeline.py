"""The list of passes: its order, that each entry has a test that the identity fails, its chores."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from graphaccel import passes
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.passes.context import Context
from graphaccel.passes.gradients import prune_output_gradients
from graphaccel.passes.pipeline import PIPELINE
from graphaccel.passes.replication import replicated
from graphaccel.passes.runner import Pass, Runner
from graphaccel.passes.verify import InvalidGraph
from graphaccel.planner.plan.plan import Plan
from tests.passes.support import LINEAR, program_of

LEVELS = ("step", "rank", "joint", "program", "sums")
ELSEWHERE = {"two_pass_head", "place_ort"}
"""Passes whose graphs are not texts: tests/passes/steps, tests/ort."""
STEPS = {
    "chunk_loss",
    "drop_backward",
    "exact_microbatch",
    "fuse",
    "lower_precision",
    "scatter_sends",
    "synchronise_batch_norm",
}
"""Passes whose texts are in tests/passes/steps."""
TESTED = [each.name for each in PIPELINE if each.name not in ELSEWHERE]


def test_levels_stand_in_order_and_names_are_files() -> None:
    levels = [each.level for each in PIPELINE]
    assert levels == sorted(levels, key=LEVELS.index)
    assert len({each.name for each in PIPELINE}) == len(PIPELINE)
    for each in PIPELINE:
        (file,) = Path(passes.__file__).parent.rglob(f"{each.name}.py")
        folders = file.relative_to(Path(passes.__file__).parent).with_suffix("").parts
        module = import_module(".".join(("graphaccel.passes", *folders)))
        assert callable(getattr(module, each.name))
        assert each.why


@pytest.mark.parametrize("name", TESTED)
def test_the_identity_fails_the_test_of_every_pass(name: str) -> None:
    module = import_module(f"tests.passes.{'steps.' * (name in STEPS)}test_{name}")
    assert module.BEFORE != module.AFTER


def test_no_pass_is_run_twice_or_left_out(captured: Callable[[str], StepGraph]) -> None:
    ran: list[str] = []

    def noting(each: Pass) -> Pass:
        def run(context: Context) -> Context:
            ran.append(each.name)
            return each.run(context)

        return replace(each, run=run)

    plan = Plan(2, data=2, microbatches=2, batch=8)
    runner = Runner(plan, tuple(map(noting, PIPELINE)))
    replicated.run_replicated(runner, Context(captured("gpt"), plan))
    assert ran == [each.name for each in PIPELINE]
    assert prune_output_gradients.__name__.rpartition(".")[2] not in ran


def run(change: Callable[[Context], Context], monkeypatch: pytest.MonkeyPatch) -> Context:
    """One pass over the program of LINEAR, with all checks."""
    monkeypatch.setenv("GRAPHACCEL_VERIFY", "1")
    only = Pass("changed", "program", change, "for a test")
    step: StepGraph = None  # type: ignore[assignment]
    context = Context(step, Plan(1), programs=(program_of(LINEAR),))
    return Runner(Plan(1), (only,)).run(context, "program")


def test_a_pass_that_leaves_a_valid_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(lambda context: context, monkeypatch).programs


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("input", "after changed: stage 0 forward: 2 inputs where the program states 1"),
        ("result", "after changed: stage 0 backward: 1 results where the program states 0"),
        ("saved", "after changed: stage 0 backward: nothing saves its input relu"),
        ("dead", "after changed: stage 0 backward first last: nothing reads mm_1"),
        ("value", "after changed: stage 0 forward: mm has no value"),
    ],
)
def test_a_pass_that_leaves_an_invalid_program(
    fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(context: Context) -> Context:
        (program,) = context.programs
        backward = program.backwards[True, True].graph
        if fault == "input":
            program = replace(program, forward_inputs=program.forward_inputs[:1])
        elif fault == "result":
            program = replace(program, backward_outputs=())
        elif fault == "saved":
            renamed = tuple(replace(v, name=f"{v.name}_2") for v in program.forward_outputs)
            program = replace(program, forward_outputs=renamed)
        elif fault == "dead":
            nodes = {node.name: node for node in backward.nodes}
            backward.output_node().args = ([nodes["t"]],)
        else:
            next(n for n in program.forward.graph.nodes if n.name == "mm").meta.pop("val")
        return replace(context, programs=(program,))

    with pytest.raises(InvalidGraph) as caught:
        run(spoil, monkeypatch)
    assert str(caught.value) == reason


def test_changes_are_logged_and_dumped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAPHACCEL_DUMP", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)

    def exchange(context: Context) -> Context:
        graph = context.programs[0].forward.graph
        relu = next(node for node in graph.nodes if node.name == "relu")
        relu.target = torch.ops.aten.tanh.default
        return context

    with caplog.at_level(logging.DEBUG, "graphaccel.passes"):
        run(lambda context: context, monkeypatch)
        assert not list(tmp_path.rglob("*.txt"))
        run(exchange, monkeypatch)
    difference = "aten.relu: 1 -> 0 (-1), aten.tanh: 0 -> 1 (+1)"
    assert caplog.records[-1].message == f"changed: {difference}"
    (file,) = tmp_path.rglob("*.txt")
    assert file.name == "01_changed.txt"
    first, second, *_ = file.read_text().splitlines()
    assert (first, second) == (f"# {difference}", "# stage 0 forward")
