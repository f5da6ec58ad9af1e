"""Check that every weight that the forward reads is registered in the model.

Export makes a constant of a tensor that is reached outside of the module tree: through a list, a
closure, a global. A parameter or buffer of the model that is reached so becomes that parameter or
buffer here; a weight that is not the model's is refused, since nothing would train it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from graphaccel.capture.state.closures import Held, held_by_module, memory_of
from graphaccel.compat.torch.fakes import FakeTensor

_OF_LOSS = (
    "self.criterion = criterion    # in __init__, and call it in forward, in place of loss_fn="
)


class Unregistered(Exception):
    """The forward reads a weight that is not registered in the model.

    tensor: what was read. of: the parameter or buffer whose storage it shares, "" if none.
    """

    def __init__(self, tensor: torch.Tensor, of: str) -> None:
        super().__init__(f"a weight of shape {list(tensor.shape)} is none of the model's")
        self.tensor, self.of = tensor, of


class Weights:
    """The parameters and buffers of a model, by storage. loss_fn: what is called with its
    output."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._model, self._loss = model, nn.Module()
        self._loss.__dict__["loss_fn"] = loss_fn
        named = [*model.named_buffers(), *model.named_parameters()]
        self._names = {id(t): name for name, t in named}
        self._memory = {memory_of(t): name for name, t in named}

    def check(self, tensor: torch.Tensor) -> None:
        """Raises Unregistered for a trainable tensor that is not the model's, and for one that
        shares storage with one of the model's. During export, inputs, the model's own tensors and
        results computed from them are fake tensors with storages of their own."""
        if id(tensor) in self._names:
            return
        of = self._memory.get(memory_of(tensor), "")
        if of or (tensor.requires_grad and not self._is_built_here(tensor)):
            raise Unregistered(tensor, of)

    def _is_built_here(self, tensor: torch.Tensor) -> bool:
        """Whether the forward makes a tensor for itself alone: a result, or `nn.Parameter(w.T)`,
        whose gradient nobody gets, in eager code either."""
        if not isinstance(tensor, FakeTensor):
            return False
        if not isinstance(tensor, nn.Parameter):
            return True
        held = (*nn.Module.parameters(self._model), *(h.value for h in held_by_module(self._model)))
        return all(value is not tensor for value in held)

    def join(self, program: Any) -> None:
        """In an exported program that is not functional yet, in place: readers of a constant that
        is a parameter or buffer read that parameter or buffer."""
        signature = program.graph_signature
        own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        places = {name.removeprefix("model."): place for place, name in own.items()}
        nodes = {n.name: n for n in program.graph_module.graph.find_nodes(op="placeholder")}
        for place, constant in signature.inputs_to_lifted_tensor_constants.items():
            value = program.constants[constant]
            name = self._memory.get(memory_of(value))
            if name in places and place in nodes:
                nodes[place].replace_all_uses_with(nodes[places[name]])
                # It has no reader left; two inputs with one storage would be treated as aliases.
                program.constants[constant] = torch.empty_like(value)

    def attributes(self, constants: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Names of constants → where the model holds them, as `closures.read_attribute` reads it;
        without those that it does not hold (created in the forward, a global)."""
        laid = {layout_of(tensor): name for name, tensor in constants.items()}
        results: dict[str, str] = {}
        for held in held_by_module(self._model) if laid else ():
            if isinstance(held.value, torch.Tensor) and not held.closed:
                name = laid.get(layout_of(held.value))
                if name is not None:
                    results.setdefault(name, ".".join(held.path))
        return results

    def described(self, tensor: torch.Tensor) -> WeightSource:
        """The name of a tensor that `check` refuses, and how to register it."""
        for held in held_by_module(self._model):
            if held.value is tensor:
                return _source_of(self._model, held)
        for module in self._model.modules():
            for name, value in _globals(module):
                inner = held_by_module(value) if isinstance(value, nn.Module) else ()
                path = next((h.path for h in inner if h.value is tensor), None)
                if value is tensor or path is not None:
                    whole = isinstance(value, nn.Module)
                    line = f"self.{name} = {name if whole else f'nn.Parameter({name})'}"
                    return WeightSource(_ticked((name, *(path or ()))), f"{line}    # in __init__")
        for held in held_by_module(self._loss):
            if held.value is tensor:
                return WeightSource(_ticked(held.path), _OF_LOSS)
        shape = list(tensor.shape)
        return WeightSource(f"a weight of shape {shape}", "self.head = head    # in __init__")


@dataclass(frozen=True)
class WeightSource:
    """name: of a weight, in backticks, or a description. line: code that registers it."""

    name: str
    line: str


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors with the same elements of the same storage."""
    return memory_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _source_of(model: nn.Module, held: Held) -> WeightSource:
    """Where a weight is, and the code that registers it."""
    owner: Any = model
    at = 0
    while at < len(held.path) and held.path[at] in owner._modules:
        owner, at = owner._modules[held.path[at]], at + 1
    first = held.path[at]
    kept = vars(owner).get(first)
    name = _ticked(held.path)
    if isinstance(kept, torch.Tensor):
        return WeightSource(name, f"self.{first} = nn.Parameter(self.{first})")
    if isinstance(kept, (list, tuple)):
        kind = "nn.ParameterList" if isinstance(kept[0], torch.Tensor) else "nn.ModuleList"
        return WeightSource(name, f"self.{first} = {kind}(self.{first})")
    if isinstance(kept, Mapping):
        tensors = all(isinstance(v, torch.Tensor) for v in kept.values())
        kind = "nn.ParameterDict" if tensors else "nn.ModuleDict"
        return WeightSource(name, f"self.{first} = {kind}(self.{first})")
    inner = held.path[at + 1] if at + 1 < len(held.path) else first
    return WeightSource(name, f"self.{inner} = {inner}    # in __init__")


def _ticked(path: Iterable[str]) -> str:
    return f"`{'.'.join(path)}`"


def _globals(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """Names that a module's forward reads outside of itself, with their values."""
    for kind in type(module).__mro__:
        function = vars(kind).get("forward")
        if not isinstance(function, FunctionType) or kind.__module__.startswith("torch."):
            continue
        known = function.__globals__
        for name in function.__code__.co_names:
            if name in known and not isinstance(known[name], ModuleType):
                yield name, known[name]
