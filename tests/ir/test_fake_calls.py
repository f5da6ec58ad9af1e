"""A call on fake tensors that is not run again has the results of one that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.node import map_arg

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import FakeTensorMode, fake_mode_of, results_of
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.ir.fake_calls import fake_call

Captured = Callable[[str], StepGraph]
aten = torch.ops.aten


def described(result: Any, args: Any) -> list[Any]:
    """Metadata of the results, and with which arguments and other results they share storage."""
    storages: dict[int, int] = {}
    for tensor in (t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)):
        storages.setdefault(storage_key(tensor), len(storages))
    return [
        (one.dtype, one.device, one.shape, one.stride(), one.storage_offset(),
         one.untyped_storage().nbytes(), storages.setdefault(storage_key(one), len(storages)))
        if isinstance(one, torch.Tensor)
        else one
        for one in pytree.tree_leaves(result)
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["gpt", "swin", "resnet", "mixtral"])
def test_every_call_of_a_step(captured: Captured, model: str) -> None:
    nodes = [n for n in captured(model).graph.graph.nodes if n.op == "call_function"]
    cached = 0
    with fake_mode_of(nodes) as mode, torch.no_grad():
        for node in nodes:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            right = described(node.target(*args, **kwargs), args)
            fake_call(node.target, args, kwargs)
            before = len(results_of(mode))
            assert described(fake_call(node.target, args, kwargs), args) == right, node
            cached += len(results_of(mode)) == before
    assert cached > 0.9 * len(nodes)


def test_equal_calls_run_once() -> None:
    """Of an op that fake modes do not cache themselves."""
    runs: list[int] = []

    @torch.library.custom_op("graphaccel_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @doubled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return torch.empty_like(x)

    with FakeTensorMode(), torch.no_grad():
        op = torch.ops.graphaccel_test.doubled.default
        for shape in ((4, 6), (4, 6), (6, 4), (4, 6)):
            assert fake_call(op, (torch.empty(shape),), {}).shape == shape
        fake_call(op, (torch.empty(6, 4).t(),), {})  # other strides
    assert len(runs) == 3


def ran(target: Any, args: tuple[torch.Tensor | Any, ...]) -> bool:
    """Whether a call runs though an equal one ran before."""
    results_of(args[0].fake_mode).clear()
    fake_call(target, args, {})
    return not results_of(args[0].fake_mode)


def test_what_its_arguments_do_not_determine_runs_each_time() -> None:
    with FakeTensorMode(), torch.no_grad():
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        assert not ran(aten.add.Tensor, (x, y))
        assert not ran(aten.transpose.int, (x, 0, 1))
        assert ran(aten.add_.Tensor, (x, y))  # writes
        assert ran(aten.as_strided.default, (x, [2], [1]))  # depends on the size of its storage
        assert ran(aten.view_as.default, (x, x.view(4, 6)))  # either one could be the source
        assert ran(lambda a: a + 1, (x,))


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(4, dtype=torch.int64)
        assert fake_call(aten.add.Tensor, (x, 1), {}).dtype == torch.int64
        assert fake_call(aten.add.Tensor, (x, 1.0), {}).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert fake_call(aten.add.Tensor, (x, 1.0), {}).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_results_are_not_shared_between_calls() -> None:
    """New tensors have storage of their own, and views that of their own argument."""
    with FakeTensorMode(), torch.no_grad():
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        sums = [fake_call(aten.add.Tensor, (x, 1), {}) for _ in range(3)]
        assert len({storage_key(one) for one in sums}) == 3
        for source in (x, y):
            view = fake_call(aten.select.int, (source, 0, 1), {})
            assert storage_key(view) == storage_key(source)
            assert (view.shape, view.storage_offset()) == ((6,), 6)


def test_gradients_are_recorded() -> None:
    with FakeTensorMode():
        x = torch.empty(4, requires_grad=True)
        for _ in range(2):
            assert fake_call(aten.mul.Tensor, (x, 2), {}).requires_grad


def test_a_refusal_is_not_kept() -> None:
    with FakeTensorMode(), torch.no_grad():
        given = torch.empty(3, dtype=torch.bool)
        for _ in range(2):
            with pytest.raises(Exception, match="nonzero"):
                fake_call(aten.nonzero.default, (given,), {})
