"""The tensors of models and optimizers by name, as this rank holds them.

A tensor held in full is a plain tensor, a shard a ShardTensor, which tells
torch.distributed.checkpoint its offsets, and a tensor of another pipeline rank a RemoteTensor, of
which only the shape is known here. Every rank has the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from graphaccel.errors import GraphMisuse
from graphaccel.runtime.module import original_class
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.optimizer_copy import inner_optimizers, state_of_all
from graphaccel.runtime.parameters.remote import RemoteTensor
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.session import Session

Optimizer = torch.optim.Optimizer

OF_ALL = ""
"""In the place of a parameter's name: what an optimizer's state has under names of its own."""

OF_THE_RUN = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Settings of a parameter group that say how a step is computed: not restored."""


@dataclass(frozen=True)
class Contents:
    """What one checkpoint holds, by the names it is saved under.

    models: the model, and further ones (averages of it). optimizers: of the model's parameters.
    objects: with `state_dict` and `load_state_dict`. values: anything else. with_weights: whether
    the tensors of the models are in it.
    """

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer]
    objects: Mapping[str, Any]
    values: Mapping[str, Any]
    with_weights: bool = True

    @property
    def sessions(self) -> dict[str, Session]:
        """Of the models that have a plan, by name."""
        handles = {k: getattr(model, "graphaccel", None) for k, model in self.models.items()}
        known = {k: getattr(handle, "session", None) for k, handle in handles.items()}
        return {k: session for k, session in known.items() if session is not None}

    @property
    def without_plan(self) -> bool:
        """Whether some model is optimized, and has no plan yet."""
        optimized = {
            k for k, m in self.models.items() if getattr(m, "graphaccel", None) is not None
        }
        return bool(optimized - set(self.sessions))

    def scales(self) -> dict[str, tuple[float, int]]:
        """The loss scale of each model that has one, and the good steps since it changed."""
        known = {name: session.scale for name, session in self.sessions.items()}
        return {k: (float(s.factor), int(s.good_steps)) for k, s in known.items() if s is not None}

    def set_scales(self, scales: Mapping[str, tuple[float, int]]) -> None:
        """Give them back."""
        for name, session in self.sessions.items():
            if session.scale is not None and name in scales:
                session.scale.restore(*scales[name])

    def weights(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers of all models: the tensors themselves, so that a write
        into one shows in its version."""
        results: dict[str, Tensor] = {}
        for name, model in self.models.items() if self.with_weights else ():
            own = dict(model.named_parameters(remove_duplicate=False))
            own |= dict(model.named_buffers(remove_duplicate=False))
            for key, value in plain_state(model).items():
                if isinstance(value, Tensor) and not key.endswith("_extra_state"):
                    results[f"{name}.{key}"] = own.get(key, value)
        return results

    def extra_states(self) -> dict[str, dict[str, Any]]:
        """What modules return from `get_extra_state`, by the names of model and module."""
        results = {}
        for name, model in self.models.items():
            state = plain_state(model).items()
            results[name] = {
                k: v for k, v in state if k.endswith("_extra_state") or not isinstance(v, Tensor)
            }
        return results

    def set_extra_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give them back to the modules."""
        for name, model in self.models.items():
            for key, value in states.get(name, {}).items():
                path = key.rpartition(".")[0]
                if key.endswith("_extra_state"):
                    model.get_submodule(path).set_extra_state(value)

    def classes(self) -> dict[str, str]:
        """Name → class of what would silently take the state of another class."""
        schedulers = {k: v for k, v in self.objects.items() if isinstance(v, LRScheduler)}
        return {name: type(v).__name__ for name, v in {**self.optimizers, **schedulers}.items()}

    def object_states(self) -> dict[str, Any]:
        """What `state_dict` returns, by name. Raises GraphMisuse (GA407) where one raises."""
        results = {}
        for name, value in self.objects.items():
            try:
                results[name] = value.state_dict()
            except Exception as error:  # of the user's object
                cause = f"{type(error).__name__}: {error}"
                raise GraphMisuse(what=f"`{name}.state_dict()` raised {cause}") from error
        return results

    def names(self, optimizer: Optimizer) -> list[list[str]]:
        """Names of an optimizer's parameters, by group; those in no model get one of the group, and
        a name that two models have is the first one's."""
        known: dict[int, tuple[str, str]] = {}
        for of, model in reversed(list(self.models.items())):
            known |= {id(p): (of, name) for name, p in model.named_parameters()}
        taken: dict[str, int] = {}

        def named(p: Tensor, otherwise: str) -> str:
            of, name = known.get(id(p), ("", otherwise))
            return name if taken.setdefault(name, id(p)) == id(p) else f"{of}:{name}"

        return [
            [named(p, f"group {g} parameter {i}") for i, p in enumerate(group["params"])]
            for g, group in enumerate(optimizer.param_groups)
        ]

    def parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The parameters of an optimizer by name."""
        pairs = zip(self.names(optimizer), optimizer.param_groups, strict=True)
        return {n: p for names, g in pairs for n, p in zip(names, g["params"], strict=True)}

    def stepped_by(self, optimizer: Optimizer) -> dict[str, Session]:
        """Of the models that were optimized together with an optimizer, by name: their plans say
        how its state is held. Another one holds its state as it makes it."""
        known = {k: s for k, s in self.sessions.items() if s.optimizer is not None}
        return {k: s for k, s in known.items() if s.optimizer.state is optimizer.state}

    def layouts(self, optimizer: Optimizer) -> dict[int, ShardLayout]:
        """Identity of a parameter → the layout of its optimizer state, where that is sharded."""
        results: dict[int, ShardLayout] = {}
        for of, session in self.stepped_by(optimizer).items():
            named = dict(self.models[of].named_parameters(remove_duplicate=False))
            results |= {id(named[name]): layout for name, layout in session.states.items()}
        return results

    def on_host(self, optimizer: Optimizer) -> frozenset[int]:
        """Identities of parameters whose optimizer state the plan keeps on the host."""
        results: set[int] = set()
        for of in self.stepped_by(optimizer):
            handle: Any = getattr(self.models[of], "graphaccel", None)
            plan = handle.plan
            if plan is not None and "optimizer" in plan.offload:
                results |= {id(p) for p in self.models[of].parameters()}
        return frozenset(results)

    def states(self) -> tuple[dict[str, Tensor], dict[str, dict[str, dict[str, Any]]]]:
        """The optimizers' state on this rank: tensors by name, and plain values by the names of
        optimizer, parameter and value."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in self.optimizers}
        for name, optimizer in self.optimizers.items():
            layouts = self.layouts(optimizer)
            if of_all := state_of_all(optimizer):
                plain[name][OF_ALL] = of_all
            for parameter, p in self.parameters(optimizer).items():
                if isinstance(p, RemoteTensor):  # what is counted here of it began at 0 with `load`
                    continue
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        full = state_name(name, parameter, key)
                        tensors[full] = _shard(value, layouts.get(id(p)))
                    else:
                        plain[name].setdefault(parameter, {})[key] = value
        return tensors, plain

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The settings of every parameter group, and the names of its parameters."""
        results = {}
        for name, optimizer in self.optimizers.items():
            pairs = zip(self.names(optimizer), optimizer.param_groups, strict=True)
            results[name] = [
                {"params": names, **{k: v for k, v in g.items() if k not in OF_THE_RUN}}
                for names, g in pairs
            ]
        return results


def state_name(optimizer: str, parameter: str, key: str) -> str:
    """The name of a tensor of optimizer state in a checkpoint."""
    return f"{optimizer}.state.{parameter}.{key}"


def with_inner(optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """These, and optimizers that they hold (as Lookahead does), as `optimizer.inner`."""
    results = dict(optimizers)
    left = list(optimizers.items())
    while left:
        name, optimizer = left.pop()
        for where, inner in inner_optimizers(optimizer).items():
            known = any(inner is one for one in results.values())
            if not known and inner.state is not optimizer.state:
                results[f"{name}.{where}"] = inner
                left.append((f"{name}.{where}", inner))
    return results


def plain_state(model: nn.Module) -> Mapping[str, Any]:
    """A model's state dict with the tensors of this rank as they are."""
    return original_class(model).state_dict(model)  # type: ignore[no-any-return]


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of which this rank holds something."""
    return {k: v for k, v in tensors.items() if not isinstance(v, RemoteTensor)}


def target(
    optimizer: Optimizer, p: Tensor, key: str, kind: tuple[torch.dtype, torch.Size], more: Target
) -> Tensor | None:
    """Memory on this rank for a tensor of optimizer state that is to be loaded.

    kind: its dtype and full shape. None for the state of a parameter of another rank.
    """
    if isinstance(p, RemoteTensor):
        return None
    dtype, shape = kind
    layout = more.layouts.get(id(p)) if len(shape) > 0 and shape == p.shape else None
    value = optimizer.state.get(p, {}).get(key)
    if layout is None and isinstance(p, ShardTensor) and shape == p.shape:
        if isinstance(value, Tensor) and (value.dtype, value.shape) == kind:
            return value
        layout = p.sharding
    local_shape = shape if layout is None else layout.local_shape
    fits = isinstance(value, Tensor) and value.dtype == dtype and value.shape == local_shape
    if not fits:
        value = torch.zeros(local_shape, dtype=dtype, device=more.device(optimizer, p, key, shape))
    return _shard(value, layout)


@dataclass(frozen=True)
class Target:
    """Where optimizer state belongs. on_host: the parameters of which the plan keeps it there."""

    layouts: Mapping[int, ShardLayout]
    on_host: frozenset[int]

    def device(self, optimizer: Optimizer, p: Tensor, key: str, shape: torch.Size) -> Any:
        """The device of one tensor of it: as `Optimizer.load_state_dict` chooses."""
        group = next(g for g in optimizer.param_groups if any(q is p for q in g["params"]))
        counts = key == "step" and not (group.get("capturable") or group.get("fused"))
        return "cpu" if counts or (id(p) in self.on_host and len(shape) > 0) else p.device


def _shard(value: Tensor, layout: ShardLayout | None) -> Tensor:
    """A tensor of state as a shard, where it has the shape of one."""
    if layout is None or value.dim() == 0 or value.shape != layout.local_shape:
        return value
    return ShardTensor(value, layout)


def local_memory(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank."""
    return tensor.local if isinstance(tensor, ShardTensor) else tensor


def map_memory(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor with its memory on this rank replaced by a copy."""
    if isinstance(tensor, ShardTensor):
        host = copy(tensor.local.detach())
        return ShardTensor(host, replace(tensor.sharding))
    return copy(tensor.detach())


def described(tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> Iterator[str]:
    """Each tensor in words: `model.out.weight float32[4, 8]`."""
    for name, kind in tensors.items():
        yield f"{name} {in_words(kind)}"


def in_words(kind: tuple[torch.dtype, torch.Size]) -> str:
    """A dtype and a shape: `float32[4, 8]`."""
    return f"{str(kind[0]).removeprefix('torch.')}{list(kind[1])}"
