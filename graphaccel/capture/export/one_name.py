"""Hide duplicate names of modules that hold buffers while a model is exported.

torch.export writes a buffer back under one name, and fails where it has two. For modules with
buffers, and without submodules, that are registered under several names: while a model is exported,
a stand-in of the same class, without buffers of its own, replaces the module under its other names;
reads and writes of the stand-in go to the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def one_name_each(model: nn.Module) -> Iterator[None]:
    """A context in which every buffer of such a module has one name."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    seen: set[nn.Module] = set()
    for parent in list(model.modules()):
        for name, module in list(parent._modules.items()):
            if module is None or module._modules or next(module.buffers(), None) is None:
                continue
            if module in seen:
                replaced.append((parent, name, module))
                parent._modules[name] = _stand_in(module)
            seen.add(module)
    try:
        yield
    finally:
        for parent, name, module in replaced:
            parent._modules[name] = module


def _stand_in(module: nn.Module) -> nn.Module:
    kind = type(module)

    def read(self: nn.Module, name: str) -> Any:
        return getattr(module, name)

    def write(self: nn.Module, name: str, value: Any) -> None:
        if name == "__dict__":  # a proxy of torch.export's takes that of the stand-in
            object.__setattr__(self, name, value)
        else:
            setattr(module, name, value)

    built = kind.__new__(type(kind.__name__, (kind,), {"__getattr__": read, "__setattr__": write}))
    built.__dict__.update(module.__dict__)
    buffers = _Lookups(module._buffers)
    built.__dict__.update(_parameters=dict(module._parameters), _buffers=buffers)
    return built


class _Lookups(dict[str, Any]):
    """Buffers of another module, found by name (`self._buffers[key]`) and listed nowhere."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self._known = known

    def __getitem__(self, name: str) -> Any:
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known
