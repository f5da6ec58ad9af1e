"""Values that a forward leaves for the script, in its own containers and objects or in the
script's: an entry of a dict, an item of a list, an attribute of an object.

A step does not run the forward, so they are not of that step. What the forward itself reads later
is no such value: it is found by putting an object there that no code can use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphaccel.capture.batch import leaf_name
from graphaccel.capture.objects import opened
from graphaccel.capture.state.carried import Ops, Path
from graphaccel.compat.torch import pytree
from graphaccel.compat.torch.fakes import attributes_of_fakes
from graphaccel.guards.followed import DEPTH, is_object
from graphaccel.guards.place import Place
from graphaccel.guards.places import STRUCTURE
from graphaccel.guards.tokens import SCALARS

_OTHERS = 1000
"""By how much other numbers are given in a forward that shows what depends on values of tensors."""
_ALONE = 16
"""How many entries are tried one by one."""

_NOTHING = object()

Forward = Callable[[Ops], bool]


class Unusable:
    """An object that no code can use."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("read by the forward")

    __getattr__ = __bool__ = __eq__ = __getitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse
    __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _refuse
    __str__ = __format__ = __contains__ = __neg__ = __abs__ = __pow__ = __mod__ = _refuse
    __hash__ = object.__hash__


def entries_of(model: nn.Module) -> dict[Path, Any]:
    """Path → plain value, of what is in containers and objects that modules hold, and of attributes
    of their parameters and buffers."""
    results: dict[Path, Any] = {}
    seen: set[int] = set()
    stack: list[tuple[Path, Any, int]] = []
    for name, module in model.named_modules():
        path = tuple(filter(None, name.split(".")))
        own = vars(module).items()
        stack += [((*path, k), v, 0) for k, v in own if k not in STRUCTURE and not _is_plain(v)]
        for of, tensor in _tensors_of(module):
            results |= {(*path, of, k): v for k, v in _attributes(tensor) if _is_plain(v)}
    while stack:
        path, value, depth = stack.pop()
        if id(value) in seen or depth > DEPTH:
            continue
        seen.add(id(value))
        for key, held in _items(value):
            if _is_plain(held):
                results[(*path, key)] = held
            else:
                stack.append(((*path, key), held, depth + 1))
    return results


def changed_entries(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> list[Path]:
    """Paths at which there is another object, and to items of lists that are gone."""
    gone = (path for path in before if path not in after)
    return [*(p for p, value in after.items() if before.get(p, _NOTHING) is not value), *gone]


def rewritten(model: nn.Module, paths: Collection[Path], forward: Forward) -> tuple[Path, ...]:
    """Those paths to entries that each forward writes anew and does not read before; and the items
    behind them in a list that a forward has made shorter."""
    there = entries_of(model) if paths else {}
    tried = [path for path in paths if path in there]
    if not tried:
        return ()
    if not _survive(model, tried, forward):
        tried = [path for path in tried[:_ALONE] if _survive(model, [path], forward)]
    lists = {path[:-1] for path in tried if path[-1] == "0"}
    return (*tried, *(p for p in paths if p not in there and p[:-1] in lists))


def in_all_layers(paths: Iterable[Path], few: nn.Module, model: nn.Module) -> tuple[Path, ...]:
    """The paths in a model of which `few` has only some layers: in every module of one class."""
    paths = tuple(paths)
    own = dict(model.named_modules())
    if len(own) == len(dict(few.named_modules())):
        return paths
    results = dict.fromkeys(paths)
    for path in paths:
        size = next(n for n in range(len(path), -1, -1) if ".".join(map(str, path[:n])) in own)
        kind = type(own[".".join(map(str, path[:size]))])
        same = (name for name, module in own.items() if size and type(module) is kind)
        results |= {(*name.split("."), *path[size:]): None for name in same}
    return tuple(results)


def left_outside(find: Callable[[], Mapping[str, Place]], forward: Forward) -> list[Place]:
    """Places outside of the model at which the forward leaves what depends on values of tensors:
    with other values, another value is there."""
    before = find()
    if not forward(Ops(shift=_OTHERS)):
        return []
    return [
        place
        for name, place in find().items()
        if place.shared and (name not in before or place.token != before[name].token)
    ]


def written_argument(args: Any, kwargs: Any, before: Mapping[str, int]) -> str:
    """The name of what a forward has put into a container of its call; "" for nothing. before: of
    `leaves_of`."""
    after = leaves_of(args, kwargs)
    return next((name for name, leaf in after.items() if before.get(name) != leaf), "")


def leaves_of(args: Any, kwargs: Any) -> dict[str, int]:
    """Name → identity, of the leaves of a call."""
    paths, _ = pytree.tree_flatten_with_path(opened((tuple(args), dict(kwargs))))
    return {leaf_name(path): id(leaf) for path, leaf in paths}


def put_at(model: nn.Module, path: Path, value: Any) -> None:
    """Put a value where a forward of a copy of the model stored one: in the attribute, or in the
    container that the attribute holds now."""
    holder: Any = model
    for i, name in enumerate(path):
        last = i == len(path) - 1
        if isinstance(holder, (list, deque)):
            while len(holder) <= int(name):
                holder.append(value)
            inner = holder[int(name)]
            if last or not _open(inner):
                holder[int(name)] = value
                return
        elif isinstance(holder, dict):
            key = next((k for k in holder if k == name or str(k) == name), name)
            inner = holder.get(key)
            if last or not _open(inner):
                holder[key] = value
                return
        else:
            inner = holder._modules.get(name) if isinstance(holder, nn.Module) else None
            inner = vars(holder).get(name) if inner is None else inner
            if not last and isinstance(holder, nn.Module) and name in dict(_tensors_of(holder)):
                vars(getattr(holder, name))[path[-1]] = value
                return
            if last or not _open(inner):
                vars(holder)[name] = value
                return
        holder = inner


def _survive(model: nn.Module, paths: Collection[Path], forward: Forward) -> bool:
    """Whether a forward runs with unusable objects at these paths, and replaces them all."""
    before, unusable = entries_of(model), Unusable()
    if any(path not in before for path in paths):
        return False
    for path in paths:
        put_at(model, path, unusable)
    ran = forward(Ops())
    after = entries_of(model)
    replaced = ran and all(path in after for path in paths)
    for path in paths:
        put_at(model, path, before[path])
    return replaced


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    held = (*module._parameters.items(), *module._buffers.items())
    return ((name, tensor) for name, tensor in held if tensor is not None)


def _attributes(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """What a script has set on a tensor; a fake one has attributes of torch's, too."""
    own = attributes_of_fakes()
    return ((k, v) for k, v in vars(tensor).items() if k not in own and k[:2] != "__")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from list(value.items())
    elif isinstance(value, (list, deque)):
        yield from ((str(i), held) for i, held in enumerate(value))
    elif is_object(value):
        yield from list(getattr(value, "__dict__", {}).items())


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*SCALARS, torch.SymInt, torch.SymFloat, torch.SymBool))


def _open(value: Any) -> bool:
    """Whether a path can continue inside a value."""
    if isinstance(value, (list, deque, dict, nn.Module)):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor))
