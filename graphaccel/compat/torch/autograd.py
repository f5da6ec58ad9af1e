"""Autograd: hooks of leaves, custom functions, checkpoints and the nodes of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint

_Tensor: Any = torch.Tensor
version_read = _Tensor._version.__get__
"""The function that reads how often a tensor was written in place."""


@contextmanager
def without_tensor_hooks(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Meanwhile these leaves have no hooks and no gradient: a backward accumulates into none and
    calls no hook. Both are restored afterwards."""
    saved = [(t, t.grad, t._backward_hooks, t._post_accumulate_grad_hooks) for t in tensors]
    # Autograd keeps the dict of post-accumulate hooks itself, whatever the attribute is set to.
    after = [(hooks, dict(hooks)) for *_, hooks in saved if hooks]
    try:
        for tensor, *_ in saved:
            tensor.grad = None
            tensor._backward_hooks = None
        for hooks, _ in after:
            hooks.clear()
        yield
    finally:
        for tensor, gradient, before, _ in saved:
            tensor.grad = gradient
            tensor._backward_hooks = before
        for hooks, held in after:
            hooks.update(held)


ENTER_RANGE = torch.ops.profiler._record_function_enter_new.default
EXIT_RANGE = torch.ops.profiler._record_function_exit._RecordFunction
"""Ops that begin and end a range of the profiler, for graphs."""


def profiler_enabled() -> bool:
    """Whether a profiler of torch's is on."""
    return torch.autograd._profiler_enabled()


def retains_graph() -> bool:
    """Whether the backward that runs now has retain_graph=True."""
    engine: Any = torch._C
    return engine._autograd._get_current_graph_task_keep_graph()


@contextmanager
def functions_applied_by(
    apply: Callable[[type, tuple[Any, ...]], Any], refuse: Callable[[type], None]
) -> Iterator[None]:
    """Meanwhile a call of `Function.apply`, also through an older reference to it, is
    `apply(the class, its arguments)`; inside a transform of torch.func, `refuse` is called."""

    def applied(kind: type, *args: Any) -> Any:
        return apply(kind, args)

    def transformed(kind: type, *_: Any, **__: Any) -> None:
        refuse(kind)

    module = torch.autograd.function
    with (
        patch.object(module._SingleLevelFunction, "apply", classmethod(applied), create=True),
        patch.object(module, "custom_function_call", transformed),
    ):
        yield


def apply_function(kind: type, *args: Any) -> Any:
    """torch's own `kind.apply(*args)`, also inside `functions_applied_by`."""
    return super(torch.autograd.function._SingleLevelFunction, kind).apply(*args)  # type: ignore[misc]


def is_checkpoint(kind: type) -> bool:
    """Whether an autograd function is that of `checkpoint(use_reentrant=True)`."""
    return kind is torch.utils.checkpoint.CheckpointFunction


@contextmanager
def checkpoints_called() -> Iterator[None]:
    """Meanwhile `checkpoint(use_reentrant=False)` calls its function and saves what that saves."""

    def nothing_around(*_: Any, **__: Any) -> Iterator[None]:
        yield

    name = "_checkpoint_without_reentrant_generator"
    with patch.object(torch.utils.checkpoint, name, nothing_around):
        yield


@contextmanager
def gradient_nodes_refused(refuse: Callable[[], None]) -> Iterator[None]:
    """Meanwhile `torch.autograd.graph` calls `refuse` when it looks for a tensor's node, to hook
    it (register_multi_grad_hook) or to return it (get_gradient_edge)."""
    with patch.object(torch.autograd.graph, "_get_grad_fn_or_grad_acc", lambda _: refuse()):
        yield


def forward_class(node: Any) -> type | None:
    """The `torch.autograd.Function` of a node of an autograd graph; None for other nodes."""
    return getattr(type(node), "_forward_cls", None)


def untransformed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the transforms of torch.func (grad, vmap) around it have wrapped."""
    library: Any = torch._C
    functorch = library._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def inside_transform() -> bool:
    """Whether this code runs inside of a transform of torch.func (grad, vmap, jvp)."""
    library: Any = torch._C
    return library._functorch.peek_interpreter_stack() is not None
