"""Makes `inspect`, pickle and copy see an optimized model as its plain original."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphaccel.errors import PartOfModel


def looks_like(original: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with the name, documentation and signature of `original`: trainers read from it
    which data set columns the model takes."""
    built = functools.wraps(original)(forward)
    try:
        built.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of a callable without a signature
        pass
    return built


def copying(original: type[nn.Module], whole: Callable[[], bool]) -> dict[str, Any]:
    """Methods that pickle and copy a model of a class derived from `original`.

    whole: whether this process holds all of the model. A pickled model is the plain one, of its
    original class. So is a copy of a whole model; a copy of a part keeps its class, which knows how
    to name the part in a state dict.
    """

    def reduce(self: nn.Module, _protocol: Any) -> Any:
        if not whole():
            raise PartOfModel(what=f"`{original.__name__}`")
        plain = original.__new__(original)
        plain.__dict__ = self.__dict__
        return plain.__reduce_ex__(1)  # later protocols check the class of what is pickled

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        cls = original if whole() else type(self)
        built = cls.__new__(cls)
        memo[id(self)] = built
        state_of = getattr(original, "__getstate__", None)
        state = self.__dict__ if state_of is None else state_of(self)
        built.__setstate__(copy.deepcopy(state, memo))
        return built

    own: dict[str, Any] = {"__reduce_ex__": reduce}
    if not hasattr(original, "__deepcopy__"):
        own["__deepcopy__"] = deepcopy
    if hasattr(original, "save_pretrained"):
        own["save_pretrained"] = _of_a_whole(original, whole)
    return own


def _of_a_whole(original: Any, whole: Callable[[], bool]) -> Callable[..., Any]:
    """`save_pretrained` of Hugging Face's libraries, which compares memory before it reads names:
    shards of one buffer look tied to it."""
    save = original.save_pretrained

    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind(self, *args, **kwargs)
        state = {**given.arguments, **given.kwargs}.get("state_dict")  # by its name, or by **kwargs
        if state is None and not whole():
            raise PartOfModel(what=f"`{original.__name__}`")
        if state is None or whole():
            return save(self, *args, **kwargs)
        with _whole_prompts(self, state):
            return save(self, *args, **kwargs)

    return looks_like(save, save_pretrained)


@contextmanager
def _whole_prompts(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Meanwhile a prompt encoder of peft has the parameters of `state`. peft saves what the encoder
    computes, on the rank that writes alone, which has a part of them under a plan."""
    encoder = getattr(model, "prompt_encoder", None)
    kept = [
        (module, name, parameter, state[f"prompt_encoder.{path}.{name}"])
        for path, module in (encoder.named_modules() if isinstance(encoder, nn.Module) else ())
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for module, name, _, whole in kept:
        setattr(module, name, nn.Parameter(whole, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter, _ in kept:
            setattr(module, name, parameter)
