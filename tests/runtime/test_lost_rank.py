"""Which module's op waited for a rank that does not answer."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from graphaccel import errors
from graphaccel.runtime.execution.lost_rank import module_of
from graphaccel.runtime.parameters.readable import read_by_all


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
    assert module_of(caught.value, [module]) == "layers.1"
    assert module_of(RuntimeError("elsewhere"), [module]) == ""


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
