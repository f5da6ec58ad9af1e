"""Export: what `torch.export` asks of a model, branches on or does not see, set for its trace."""

from __future__ import annotations

import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import config, graph

# Raised by export where the user's code branches on the value of a tensor
# (capture/export/export.py).
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as DataDependentError

# Its cache of parametrized weights has no public way to start empty.
from torch.nn.utils import parametrize

__all__ = ["DataDependentError"]


@contextmanager
def exporting() -> Iterator[None]:
    """Meanwhile `torch.compiler.is_exporting()` is true, which models ask before they branch (masks
    that depend on the batch)."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


@contextmanager
def keywords_as_names() -> Iterator[None]:
    """Meanwhile the code of a graph reads a submodule that is named like a Python keyword (a key of
    an `nn.ModuleDict`) by `getattr`; torch writes `self.heads.class`, which is a SyntaxError."""

    def read(base: str, target: str) -> str:
        for name in target.split("."):
            plain = name.isidentifier() and not keyword.iskeyword(name)
            base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
        return base

    with patch.object(graph, "_format_target", read, create=True):
        yield


@contextmanager
def questions_whether_compiling() -> Iterator[list[bool]]:
    """Yields a list to which every answer of `torch.compiler.is_compiling()` is appended."""
    answers: list[bool] = []
    own = torch.compiler.is_compiling

    def asked() -> bool:
        answers.append(own())
        return answers[-1]

    with patch.object(torch.compiler, "is_compiling", asked):
        yield answers


@contextmanager
def not_compiling() -> Iterator[None]:
    """Meanwhile `torch.compiler.is_compiling()` is false, as in eager mode."""
    with patch.object(torch.compiler, "is_compiling", lambda: False):
        yield


@contextmanager
def without_stack_traces() -> Iterator[None]:
    """Meanwhile traced nodes do not record the lines they come from: a tenth of the time of an
    export."""
    with patch.object(config, "do_not_emit_stack_traces", True, create=True):
        yield


def is_known(size: torch.SymInt) -> bool:
    """Whether a size has a value: one that depends on the data of a tensor has none."""
    return size.node.has_hint()


@contextmanager
def parametrizations_computed() -> Iterator[None]:
    """In the caller's `parametrize.cached()` each parametrized weight is computed once meanwhile,
    and not read from another forward."""
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Meanwhile `torch.inference_mode` is `torch.no_grad`: export does not see the former. In an
    inference mode of the caller's, where nothing has a gradient, it stays what it is."""
    if torch.is_inference_mode_enabled():
        yield
        return
    kind = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__
    before: list[bool] = []

    def begin(mode: torch.inference_mode) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(before[-1] and not mode.mode)

    def end(mode: torch.inference_mode, *error: Any) -> None:
        torch.set_grad_enabled(before.pop())

    try:
        kind.__enter__, kind.__exit__ = begin, end  # type: ignore[method-assign, assignment]
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def causal_masks_as_given() -> Iterator[None]:
    """Meanwhile `nn.Transformer` does not compare its masks with a causal one, which would branch
    on a tensor: it adds them as any other mask, with the same result."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with patch.object(torch.nn.modules.transformer, "_detect_is_causal_mask", hint):
        yield
