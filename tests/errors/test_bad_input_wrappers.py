"""Systems that stand around an optimized model, or on it: refused, or honoured if they call it."""

# ruff: noqa: E501 (texts are asserted as they are printed)

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphaccel
from graphaccel.compat.torch.modules import DDP_READS
from graphaccel.errors import WrappedModel
from tests.support.captures import captures_of
from tests.support.pool import Pool
from tests.support.small import Classifier, small_batch


def _optimized() -> nn.Module:
    with captures_of("wrappers"):
        return graphaccel.optimize(Classifier(), example_batch=small_batch())


def _autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper as Accelerate's: what it is given runs under autocast, which is off here."""

    @functools.wraps(function)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return autocast_forward


def _prepared(model: nn.Module) -> nn.Module:
    """What `Accelerator(mixed_precision=...).prepare(model)` does to a model's forward."""
    model.forward = MethodType(_autocast(model.forward.__func__), model)
    return model


def test_a_forward_that_calls_the_planned_one_is_honoured() -> None:
    model = _prepared(_optimized())
    loss = model(*small_batch())
    assert type(loss.grad_fn).__name__ == "HandOutBackward"
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def _line(function: Any) -> int:
    return inspect.getsourcelines(function)[1]


def test_a_forward_set_before_is_refused() -> None:
    with pytest.raises(WrappedModel) as caught:
        graphaccel.optimize(_prepared(Classifier()))
    first, where, *_ = str(caught.value).splitlines()
    assert (
        first
        == "error[GA410]: `model.forward` was replaced by `autocast_forward` before optimize()"
    )
    assert where.endswith(f"test_bad_input_wrappers.py:{_line(_autocast) + 3}")
    assert str(caught.value).splitlines()[-3:] == [
        "  why:  it stands on the model itself and would be called instead of the planned step",
        "  help: wrap the model after optimize(), or take it off before:  del model.forward",
        "  explain: graphaccel explain GA410",
    ]


def _own(x: Tensor, y: Tensor) -> Tensor:
    return (x * y[:, None]).sum()


def test_a_forward_that_does_not_call_the_planned_one_is_refused() -> None:
    model = _optimized()
    model.forward = _own
    with pytest.raises(WrappedModel) as caught:
        model(*small_batch())
    assert f"test_bad_input_wrappers.py:{_line(_own)}" in str(caught.value)
    assert str(caught.value).splitlines()[0] == (
        "error[GA410]: `model.forward` was replaced by `_own`, which does not call the planned step"
    )
    del model.forward
    model(*small_batch()).backward()


COMPILED = """\
error[GA410]: the optimized model is called inside torch.compile
  why:  the step is one graph already, whose forward and backward run in one call
  help: leave torch.compile out; its compiler is had by:  graphaccel.optimize(model, optimizer, compile='inductor')
  explain: graphaccel explain GA410"""


def _compiled(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="eager")


def _compiled_in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="eager")
    return model


def _compiled_step(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x, y: model(x, y) * 2, backend="eager")


@pytest.mark.parametrize("way", [_compiled, _compiled_in_place, _compiled_step])
def test_torch_compile_around_it(way: Callable[..., Any]) -> None:
    call = way(_optimized())
    with pytest.raises(WrappedModel) as caught:
        call(*small_batch())
    assert str(caught.value) == COMPILED


def test_a_part_that_torch_compile_made() -> None:
    model = Classifier(torch.compile(nn.Linear(8, 8), backend="eager"))
    with pytest.raises(WrappedModel) as caught:
        graphaccel.optimize(model)
    assert str(caught.value) == COMPILED.replace(
        "the optimized model is called inside torch.compile",
        "`inner` is one that torch.compile made",
    )


def test_data_parallel() -> None:
    model = nn.DataParallel(_optimized())
    with pytest.raises(WrappedModel) as caught:
        model(*small_batch())
    assert (
        str(caught.value)
        == """\
error[GA410]: the optimized model is inside DataParallel
  why:  graphaccel splits the step over devices and sums the gradients itself
  help: leave the wrapper out, and call the model that optimize() returned
  explain: graphaccel explain GA410"""
    )
    with pytest.raises(WrappedModel) as caught:
        graphaccel.optimize(Classifier(nn.DataParallel(nn.Linear(8, 8))))
    assert (
        str(caught.value)
        == """\
error[GA410]: `inner` is wrapped in DataParallel
  why:  graphaccel splits the step over devices and sums the gradients itself
  help: optimize the model without it; its settings are those of the plan
  explain: graphaccel explain GA410"""
    )


def _distributed() -> None:
    with captures_of("wrappers"):
        model = graphaccel.optimize(Classifier(), data=2, example_batch=small_batch())
    assert not hasattr(model, DDP_READS)
    with pytest.raises(WrappedModel, match="the optimized model is inside DistributedDataParallel"):
        DistributedDataParallel(model)
    part = Classifier(DistributedDataParallel(nn.Linear(8, 8)))
    with pytest.raises(WrappedModel, match="`inner` is wrapped in DistributedDataParallel"):
        graphaccel.optimize(part, data=2)


@pytest.mark.multiprocess
def test_distributed_data_parallel(pool: Pool) -> None:
    pool.run(2, _distributed)


def _fully_sharded(when: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    if when == "before":
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters())  # whose parameters it replaces
        fully_shard(model, mesh=mesh)
        for given in ((), (optimizer,)):
            with pytest.raises(WrappedModel, match="the model is wrapped in FSDPModule"):
                graphaccel.optimize(model, *given, data=2)
        return
    with captures_of("wrappers"):
        model = graphaccel.optimize(Classifier(), data=2, example_batch=small_batch())
    fully_shard(model, mesh=mesh)
    with pytest.raises(WrappedModel, match="the optimized model is inside FSDPModule"):
        model(*small_batch())


@pytest.mark.multiprocess
@pytest.mark.parametrize("when", ["before", "after"])
def test_fully_shard(pool: Pool, when: str) -> None:
    pool.run(2, _fully_sharded, when)
