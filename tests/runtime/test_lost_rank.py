"""Which module's op waited for a rank that does not answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import fx, nn

from graphaccel import errors
from graphaccel.ir.program import StageProgram, Value
from graphaccel.runtime.execution import failures
from graphaccel.runtime.execution.failures import Failures
from graphaccel.runtime.execution.lost_rank import module_of, modules_of, values_from
from graphaccel.runtime.parameters.readable import read_by_all
from graphaccel.schedule.table import Action


def _wait(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("gloo: timed out")


def test_the_module_of_the_node_that_raised() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    first.meta["module"] = "layers.0"
    second = graph.call_function(_wait, (first,))
    second.meta["module"] = "layers.1"
    graph.output(second)
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(1))
    assert module_of(caught.value, module) == "layers.1"
    assert module_of(RuntimeError("elsewhere"), module) == ""
    del second.meta["module"]  # as of a call that a pass made
    assert module_of(caught.value, module) == "layers.0"
    bucket = Value("bucket", "0")
    assert module_of(caught.value, module, [bucket], [("a.w", "b")]) == "layers.0"
    second.args = (x,)
    assert module_of(caught.value, module, [bucket], [("a.w", "b")]) == "a, the model itself"


def test_many_modules_are_counted() -> None:
    names = [f"layers.{n}.{kind}" for n in range(6) for kind in ("weight", "bias")]
    assert modules_of(names) == "layers.0, layers.1, layers.2 and 3 more"


@pytest.mark.parametrize(
    ("action", "modules"),
    [
        (Action("receive", 1, 0, 0, "forward"), "inner"),
        (Action("send", 0, 0, 1, "forward"), "inner"),
        (Action("receive", 0, 0, 1, "backward"), "out"),
        (Action("forward", 0, 0), ""),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_message_has_the_modules_of_its_values(action: Action, modules: str) -> None:
    assert values_from(_two_stages(), action) == modules


def _graph(module: str) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    node.meta["module"] = module
    graph.output([node])
    return fx.GraphModule(nn.Module(), graph)


def _two_stages() -> Any:
    """The first stage sends to the second, which sends back its gradient."""
    forward, backward = _graph("inner"), _graph("out")
    sent = (Value("sent", "v", (1,)),), (Value("sent", "dv", (0,)),)
    first = StageProgram(0, forward, (), sent[0], {(True, True): backward}, (), ())
    second = StageProgram(1, forward, (), (), {(True, True): backward}, (), sent[1])
    return SimpleNamespace(stages=(first, second))


def test_the_text_says_it() -> None:
    error = errors.RankLost(
        rank=1,
        stage=None,
        lost="rank 0",
        last_action="forward of microbatch 0",
        waiting_for="backward of microbatch 0, stage 0",
        cause="timed out",
        module="layers.1",
    )
    assert "\n  in module:         layers.1\n" in str(error)


def test_a_store_that_went_with_its_rank_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", server.port, None, False))
    monkeypatch.setattr(failures, "default_store", lambda: store)
    Failures(0, 2).publish(ValueError("too long"))
    error = RuntimeError("[pair.cc:1] Connection closed by peer")
    assert failures.cause_of(error) == "rank 0 raised ValueError: too long"
    del server
    assert failures.cause_of(error) == "Connection closed by peer"
    Failures(0, 2).publish(ValueError("too long"))
    assert capfd.readouterr().err == ""


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    stopped = SimpleNamespace(check=lambda keys: never.wait() and False)
    monkeypatch.setattr(failures, "default_store", lambda: stopped)
    monkeypatch.setattr(failures, "_ANSWERS", 0.05)
    assert failures.cause_of(RuntimeError("timed out")) == "timed out"
    never.set()


def _gone() -> torch.Tensor:
    raise RuntimeError("[pair.cc:1] Timed out waiting 15000ms for send operation to complete")


def test_a_read_that_other_ranks_do_not_join_names_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(errors.RankLost) as caught:
        read_by_all(_gone)
    assert f"whose values {__file__}:" in str(caught.value)
    assert "reported:          Timed out waiting 15000ms" in str(caught.value)
    with pytest.raises(RuntimeError, match="a size"):
        read_by_all(_wrong)


def _wrong() -> torch.Tensor:
    raise RuntimeError("a size of this rank")
