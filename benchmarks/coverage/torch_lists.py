"""Entries of torch's own lists: `op_db` (operators) and `module_db` (`torch.nn`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.batched import Sample, with_batch
from benchmarks.coverage.entry import (
    SEED,
    Entry,
    NotMeasured,
    first_line,
    says_something,
    scaled_entry,
)

MOST_SAMPLES = 200
"""Samples that are looked at for one with a batch."""


def op_names() -> list[str]:
    """All differentiable entries of op_db."""
    return [op.full_name for op in _ops() if op.supports_autograd]


def op_entry(name: str, *, split: bool) -> Entry:
    """The first sample of an operator; with `split` the first one with a batch."""
    op = next(op for op in _ops() if op.full_name == name)
    dtype = next((d for d in _DTYPES if op.supports_dtype(d, "cpu")), None)
    if dtype is None:
        raise NotMeasured("neither float64 nor float32, nor complex numbers")

    def samples() -> Iterator[Sample]:
        torch.manual_seed(SEED)
        for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
            finish = sample.output_process_fn_grad

            def call(*args: Any, finish: Any = finish, **kwargs: Any) -> Any:
                return finish(op(*args, **kwargs))

            yield Sample(call, (sample.input, *sample.args), sample.kwargs)

    return _entry(samples(), split=split)


_DTYPES = (torch.float64, torch.float32, torch.complex128)


def _ops() -> list[Any]:
    with _flags_left_free():
        from torch.testing._internal import common_methods_invocations as found
    # The list seeds torch's generator in each call of an op that draws; a model does not.
    found.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return found.op_db


def module_names() -> list[str]:
    """All entries of module_db."""
    return [info.name for info in _modules()]


def module_entry(name: str, *, split: bool) -> Entry:
    """The first sample of a module; with `split` the first one with a batch."""
    info = next(info for info in _modules() if info.name == name)
    dtype = torch.float64 if torch.float64 in info.dtypes else torch.float32

    def samples() -> Iterator[Sample]:
        torch.manual_seed(SEED)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=True
        )
        for given in inputs:
            if given.forward_input is None:
                continue
            torch.manual_seed(SEED)
            made = given.constructor_input
            module: nn.Module = info.module_cls(*made.args, **made.kwargs).to(dtype)
            arguments = given.forward_input
            yield Sample(module, tuple(arguments.args), arguments.kwargs)

    return _entry(samples(), split=split)


def _modules() -> list[Any]:
    with _flags_left_free():
        from torch.testing._internal.common_modules import module_db

    return module_db


@contextmanager
def _flags_left_free() -> Iterator[None]:
    """torch's test modules forbid the process to set flags of backends when they are imported."""
    before = torch.backends.disable_global_flags
    torch.backends.disable_global_flags = lambda: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.disable_global_flags = before


def _entry(samples: Iterator[Sample], *, split: bool) -> Entry:
    """The first sample, with a batch or without, whose loss is a number."""
    chosen = (s for s, _ in zip(samples, range(MOST_SAMPLES), strict=False))
    if split:
        chosen = with_batch(chosen)
    first = None
    try:
        for sample in chosen:
            entry = scaled_entry(sample.call, sample.args, sample.kwargs, sample.held)
            first = first or entry
            if says_something(entry):
                return entry
    except NotMeasured:
        if first is None:
            raise
    except Exception as error:
        raise NotMeasured(f"torch's sample: {first_line(error)}") from error
    if first is None:
        raise NotMeasured("no sample has a batch" if split else "no sample")
    return first
