"""Elementwise ops: what torch's own database calls elementwise, proved by running it in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import make_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo

from graphaccel.ir.calls import is_random
from graphaccel.sharding.rules.ops.factories import UNIFORM
from graphaccel.sharding.rules.ops.pointwise import is_pointwise
from graphaccel.sharding.rules.prove import faults
from graphaccel.sharding.rules.table import rule_of
from tests.support.recorded import recorded_nodes

# Their functions return what no autograd knows, or run a kernel that is compiled on a GPU.
_NO_CALLS = {"jiterator_unary", "jiterator_binary", "jiterator_binary_return_by_ref"}


def _entries() -> dict[str, OpInfo]:
    kinds = (UnaryUfuncInfo, BinaryUfuncInfo)
    found = {}
    for info in op_db:
        if isinstance(info, kinds) and info.name not in _NO_CALLS:
            found.setdefault(info.name, info)
    return found


ENTRIES = _entries()


def _dtype(info: OpInfo) -> torch.dtype | None:
    wanted = (torch.float64, torch.int64, torch.bool)
    return next((d for d in wanted if info.supports_dtype(d, "cpu")), None)


def _arguments(info: OpInfo, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    grad = dtype.is_floating_point and info.supports_autograd
    if isinstance(info, UnaryUfuncInfo):
        low, high = info.domain
        x = make_tensor(4, 2, dtype=dtype, device="cpu", low=low, high=high, requires_grad=grad)
        kwargs, _ = info.sample_kwargs("cpu", dtype, x)
        return (x,), kwargs
    left, right = (
        make_tensor(
            *shape, dtype=dtype, device="cpu", requires_grad=grad, **{"exclude_zero": True, **given}
        )
        for shape, given in (
            ((4, 2), info.lhs_make_tensor_kwargs),
            ((2,), info.rhs_make_tensor_kwargs),
        )
    )
    return (left, right), {}


@pytest.mark.parametrize("name", ENTRIES)
def test_torchs_elementwise_entries(name: str) -> None:
    """Forward and backward of every elementwise entry have rules that hold, and no dim of an
    elementwise call stays whole."""
    torch.manual_seed(0)
    info = ENTRIES[name]
    dtype = _dtype(info)
    if dtype is None:
        pytest.skip("of no dtype that is run here")
    args, kwargs = _arguments(info, dtype)
    nodes = recorded_nodes(info.op, *args, **kwargs)
    for node in nodes:
        rule = rule_of(node)
        assert rule is not None, node.target
        assert not (is_pointwise(node.target) and rule.whole), node.target
        if node.target not in UNIFORM and not is_random(node):
            assert list(faults(node, rule)) == [], node.target
