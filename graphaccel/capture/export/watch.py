"""Intercept what a model's forward does outside of graph ops while it is exported."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from graphaccel.capture.export import known_values
from graphaccel.capture.export.buffer_values import buffers_answer
from graphaccel.capture.export.python_function import (
    CALLS,
    Calls,
    FunctionCall,
    PythonFunction,
    Result,
    RuleRefused,
    Slot,
)
from graphaccel.capture.export.recorded import functions_behind, record, recording, tried_hook
from graphaccel.capture.export.statistics import FORMS, cumulative_averages
from graphaccel.capture.export.weights import Weights
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.autograd import (
    checkpoints_called,
    gradient_nodes_refused,
    untransformed,
    version_read,
)
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.compat.torch.modules import conversions_checked
from graphaccel.compat.torch.tensors import storage_key
from graphaccel.kernels.ops.ctc_loss import ctc_loss

INSIDE = (f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Folders of torch and of graphaccel: frames in them are not the user's."""


class OwnGenerator(Exception):
    """The forward draws from a generator that it holds itself."""


TRANSFORMS = tuple(f"{os.sep}_functorch{os.sep}{name}.py" for name in ("apis", "eager_transforms"))
"""How the names of torch's files end that hold the transforms of torch.func."""


class GradientInside(Exception):
    """A gradient that the forward takes is not part of the graph. stack: where it is taken.
    transformed: by a transform of torch.func."""

    def __init__(self, stack: Sequence[traceback.FrameSummary]) -> None:
        super().__init__("a gradient in the forward")
        before = [i for i, frame in enumerate(stack) if frame.filename.endswith(TRANSFORMS)]
        self.transformed = bool(before)
        self.stack = stack[: before[0]] if before else stack


_LOST = ("fake tensor in", "functorch tensor", "TensorWrapper")
"""In texts of torch.export about a value of a gradient or a transform that is not in the graph."""

_MODULE_TRACKER = f"utils{os.sep}module_tracker.py"
_HANDS_OUT = "return the tensor from the model's forward, with loss_fn='outside'"


class Watch:
    """Watches the forward of `model` during one export; weights are the model's.

    calls: the recorded calls, to be put back into the exported graph.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self.calls = Calls()
        self._gradients: list[Sequence[traceback.FrameSummary]] = []
        self._model, self._weights = model, weights

    @contextmanager
    def around(self, given: Iterable[Any] = ()) -> Iterator[None]:
        """A context for the forward of what is `given`. Raises Unregistered and RuleRefused."""
        self.calls.calls.clear()
        self.calls.marks.clear()
        self._gradients.clear()
        # Of nn.Module: a class may override parameters(), to list those that it trains.
        own = (*nn.Module.parameters(self._model), *self._model.buffers())
        batch = _tensors(pytree.tree_leaves(given))
        averages = cumulative_averages()
        with ExitStack() as stack:
            stack.enter_context(conversions_checked(_converted))
            for context in (recording(), checkpoints_called(), _saved_as_they_are(), averages):
                stack.enter_context(context)
            stack.enter_context(gradient_nodes_refused(_node_read))
            functions = _Functions(self._weights, own, batch, self.calls, self._gradients)
            stack.enter_context(functions)
            stack.enter_context(buffers_answer(self._model))
            yield

    def refuse_lost(self, program: Any) -> None:
        """Raises GradientInside where a gradient that the forward takes is a constant in the
        exported program: export loses gradients that read the result of an op."""
        lifted = program.graph_signature.inputs_to_lifted_tensor_constants.values()
        if self._gradients and any(isinstance(program.constants[c], FakeTensor) for c in lifted):
            raise GradientInside(self._gradients[0])

    def cause(self, error: Exception) -> Exception:
        """The reason for a failure of export, where the forward takes a gradient: GradientInside;
        any other failure as it is."""
        if self._gradients and any(lost in str(error) for lost in _LOST):
            return GradientInside(self._gradients[0])
        return error

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for the whole export: makes recorded calls available."""
        token = CALLS.set(self.calls)
        try:
            yield
        finally:
            CALLS.reset(token)

    def finish(self, results: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """At the end of the forward: results of hooks, to be returned with the forward's results.

        Raises RuleRefused for an autograd function in the graph of `results` that was not
        intercepted."""
        kind = next(functions_behind(results), None)
        if kind is not None:
            raise RuleRefused(
                f"the backward of `{kind.__name__}`",
                "it was applied in a way that is not seen",
                f"apply it in the forward:  {kind.__name__}.apply(x)",
            )
        marks = self.calls.marks
        marks[:] = [(mark, h) for mark, h in marks if h.id in (h.hooks_dict_ref() or ())]
        return tuple(mark for mark, _ in marks)


class Copies(TorchFunctionMode):
    """Makes `copy.deepcopy` of a tensor without data a clone: torch's own copies its memory, which
    is not there, and corrupts the process's. hooked: whether a hook is set on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return _copied(func, *args)
        self.hooked |= func is torch.Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _copied(func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not tensor.is_leaf:
        return func(tensor, memo)  # raises
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone()
    return memo[id(tensor)]


class _Functions(TorchFunctionMode):
    """Intercepts every torch function that the forward calls, with its tensors.

    own: the parameters and buffers that stand in for the model's during export. given: tensors that
    others hold as well. gradients: gets the stacks of gradients that are taken: by
    `torch.autograd.grad`, by torch.func.
    """

    def __init__(
        self,
        weights: Weights,
        own: Sequence[torch.Tensor],
        given: Iterable[torch.Tensor],
        calls: Calls,
        gradients: list[Any],
    ) -> None:
        super().__init__()
        self._weights, self._own, self._calls = weights, {id(t) for t in own}, calls
        self._gradients = gradients
        self._memory = {storage_key(t) for t in (*own, *given)}
        self._read: dict[int, WeakSet[torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs.values())):
            if id(tensor) not in self._own:
                plain = untransformed(tensor)
                if id(plain) not in self._own:
                    self._weights.check(plain)
                if plain is not tensor and not self._gradients:
                    self._gradients.append(traceback.extract_stack())
        if "generator" in kwargs:
            kwargs = _default_generator(kwargs)
        form = FORMS.get(func)
        if form is not None:
            return form(func, *args, **kwargs)
        name = _NAMES.get(func)
        if name is None:
            return func(*args, **kwargs)
        return getattr(self, f"_{name}")(func, *args, **kwargs)

    def _gradient(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        self._gradients.append(traceback.extract_stack())
        return func(*args, **kwargs)

    def _backward(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuleRefused(
            "`backward()` in the forward",
            "a step has one backward, after its forward, and `.grad` is written there",
            "return the loss, and call loss.backward() in the script",
        )

    def _deepcopy(self, func: Any, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return _copied(func, tensor, memo)

    def _read_data(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach()
        if id(tensor) in self._own:
            self._read.setdefault(id(tensor), WeakSet()).add(result)
        return result

    def _write_data(self, func: Any, tensor: torch.Tensor, value: Any) -> None:
        if self._is_update(tensor, value):
            tensor.detach().copy_(value.detach())
            return
        raise RuleRefused(
            "a write to `.data`",
            "gradients would not know of the new value",
            "leave that to the script, before each step:  "
            "with torch.no_grad(): model.layer.weight.copy_(value)",
        )

    def _is_update(self, tensor: torch.Tensor, value: Any) -> bool:
        """Whether `tensor.data = value` gives a frozen weight new values, and no more: the memory
        of `value` is nobody else's, and nobody has the old one."""
        if id(tensor) not in self._own or tensor.requires_grad or self._read.get(id(tensor)):
            return False
        if not isinstance(value, torch.Tensor):
            return False
        fits = (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
        return fits and storage_key(value) not in self._memory

    def _read_node(self, func: Any, tensor: torch.Tensor) -> Any:
        node = func(tensor)
        if node is not None and _asked_by_user():
            _node_read()
        return node

    def _read_grad(self, func: Any, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._own and _asked_by_user():
            raise RuleRefused(
                "a read of `.grad` of a parameter",
                "the graph has no input for the gradients of earlier steps",
                "pass its values to the model:  model(x, gradient)",
            )
        return func(tensor)

    def _read_version(self, func: Any, tensor: torch.Tensor) -> Any:
        if _asked_by_user():
            raise RuleRefused(
                "a read of `_version` of a tensor",
                "it counts writes, which is no value of a graph",
                "count in the script, and read that in the forward:  model.version += 1",
            )
        return func(tensor)

    def _retain_grad(self, func: Any, tensor: torch.Tensor) -> Any:
        if tensor.is_leaf:
            return func(tensor)
        raise RuleRefused(
            "`retain_grad()` of an activation",
            "activations are values of one graph, whose gradients nobody keeps",
            _HANDS_OUT,
        )

    def _gaussian_nll_loss(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Without its check of the variance, which reads values."""
        with patch.object(torch, "any", lambda *_, **__: False):
            return func(*args, **kwargs)

    def _ctc_loss(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return ctc_loss(*args, **kwargs)

    def _post_hook(self, func: Any, tensor: torch.Tensor, hook: Any) -> Any:
        raise RuleRefused(
            "a hook on the gradient of a parameter",
            "each call of the forward would add one more",
            "call register_post_accumulate_grad_hook once, outside of the forward",
        )

    def _hook(self, func: Any, tensor: torch.Tensor, hook: Any) -> Any:
        handle = func(tensor, hook)
        if id(tensor) in self._own:
            raise RuleRefused(
                "a hook on the gradient of a parameter",
                "each call of the forward would add one more",
                "call register_hook once, outside of the forward",
            )
        tried_hook(hook, tensor)
        code = getattr(hook, "__code__", None)
        name = "hook" if code is None else f"hook_of_line_{code.co_firstlineno}"
        target = PythonFunction(name, hook)
        (mark,) = record(FunctionCall(target, (Slot(0),), (Result.of(tensor),)), [tensor])
        self._calls.marks.append((mark, handle))
        return handle


_NAMES = {
    torch.Tensor.__deepcopy__: "deepcopy",
    torch.Tensor.data.__get__: "read_data",  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: "write_data",  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: "read_node",  # type: ignore[attr-defined]
    torch.Tensor.grad.__get__: "read_grad",  # type: ignore[attr-defined]
    version_read: "read_version",
    torch.Tensor.retain_grad: "retain_grad",
    torch.Tensor.register_post_accumulate_grad_hook: "post_hook",
    torch.Tensor.register_hook: "hook",
    torch.Tensor.backward: "backward",
    torch.autograd.grad: "gradient",
    F.gaussian_nll_loss: "gaussian_nll_loss",
    F.ctc_loss: "ctc_loss",
}


def _default_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments without torch's default generator. Raises OwnGenerator for another one."""
    if isinstance(kwargs["generator"], torch.Generator):
        if kwargs["generator"] is not torch.default_generator:
            raise OwnGenerator
        return {name: value for name, value in kwargs.items() if name != "generator"}
    return kwargs


def _asked_by_user() -> bool:
    """Whether the code that calls a torch function, two frames above a method of `_Functions` and
    the mode that answers for known values, is the user's."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename == known_values.__file__:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(INSIDE)


def _node_read() -> None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_MODULE_TRACKER):
            raise RuleRefused(
                "`FlopCounterMode`, which is active around the call of the model,",
                "it hooks into the gradient of each module, and the step is one graph",
                "count the model as it is, before optimize:  "
                "with FlopCounterMode() as flops: model(x).backward()",
            )
        frame = frame.f_back
    raise RuleRefused(
        "what is asked of `grad_fn`",
        "the graph has nodes of its own, to which hooks on these do not belong",
        "use a hook on the tensor:  h.register_hook(lambda gradient: gradient * 0.1)",
    )


def _converted(module: nn.Module) -> None:
    raise RuleRefused(
        f"`{type(module).__name__}.to(...)`, which changes the module's dtype or device,",
        "the weights of the captured step are those that the optimizer was made with",
        "convert it before the optimizer is made:  model.float()",
    )


@contextmanager
def _saved_as_they_are() -> Iterator[None]:
    """Refuses hooks on saved tensors; ignores `save_on_cpu`, as the plan decides on offload."""

    def enter(hooks: saved_tensors_hooks) -> None:
        if not isinstance(hooks, save_on_cpu):
            raise RuleRefused(
                "a hook on saved tensors (saved_tensors_hooks)",
                "the plan decides what is saved of the forward, and what is computed again",
                "leave it out, and save memory by the plan:  "
                "graphaccel.optimize(model, optimizer, recompute='all')",
            )

    def leave(hooks: saved_tensors_hooks, *_: Any) -> None:
        pass

    with (
        patch.object(saved_tensors_hooks, "__enter__", enter),
        patch.object(saved_tensors_hooks, "__exit__", leave),
    ):
        yield


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
