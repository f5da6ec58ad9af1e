"""FX graph modules: made or compiled at first use, code that frees its inputs, and as bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

# Graphs that are compiled when they are first called, and torch's own that are made so.
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

# Graphs as Python source: the calling convention of stage graphs (BoxedCode).
from torch.fx.graph import CodeGen

from graphaccel.compat.torch.fakes import FakeTensorMode


class BoxedCode(CodeGen):
    """Code of a graph that takes one list and empties it, so that inputs are freed after their last
    use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the generated function: unpack the list, then empty it."""
        names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
        return f"def forward(self, boxed):{unpack}\n    boxed.clear()"


def graph_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose Python code is generated when it is first called: most graphs are
    rewritten before that."""
    return _LazyGraphModule(root, graph)


def compiled_when_called() -> AbstractContextManager[None]:
    """Meanwhile graphs that torch traces are compiled as Python code when they are first called:
    passes of its export rewrite them several times before that, if they are called at all."""
    return _use_lazy_graph_module(True)


class _Deferred(_LazyGraphModule):
    """A module whose graph is built when it is first read."""

    def __init__(self, root: Any, build: Callable[[], fx.Graph], source: Any) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__["_unbuilt"] = (root, build, source)

    def __getattr__(self, name: str) -> Any:
        if name == "_graph" and "_unbuilt" in self.__dict__:
            root, build, _ = self.__dict__.pop("_unbuilt")
            super().__init__(root, build())
            return self.__dict__["_graph"]
        if "_unbuilt" in self.__dict__ and not name.startswith("__"):
            _ = self.graph  # building it sets everything else
            return getattr(self, name)
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Any) -> fx.GraphModule:
        return _LazyGraphModule(self, self.graph).__deepcopy__(memo)


def deferred_module(root: Any, build: Callable[[], fx.Graph], source: Any) -> fx.GraphModule:
    """A module of a graph that `build` returns when it is first read. source: for
    `deferred_from`."""
    return _Deferred(root, build, source)


def deferred_from(module: fx.GraphModule) -> Any:
    """The source of a module whose graph was not read yet; None for any other."""
    unbuilt = module.__dict__.get("_unbuilt")
    return None if unbuilt is None else unbuilt[2]


def is_deferred(module: fx.GraphModule) -> bool:
    """Whether the module's graph was not read, and so not built, yet."""
    return "_unbuilt" in module.__dict__


def boxed(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `BoxedCode`, which a deferred graph has from when it is built."""
    unbuilt = module.__dict__.get("_unbuilt")
    if unbuilt is not None:
        root, build, source = unbuilt
        module.__dict__["_unbuilt"] = (root, lambda: _boxed(build()), source)
    else:
        _boxed(module.graph)
        module.recompile()
    return module


def _boxed(graph: fx.Graph) -> fx.Graph:
    graph.set_codegen(BoxedCode())
    return graph


def graph_bytes(value: Any) -> bytes:
    """Anything that holds fx graphs, as bytes; fake tensors without data, others with theirs."""
    from torch.fx._graph_pickler import GraphPickler, Options  # it loads Inductor: a second

    options = Options(ops_filter=None)
    if hasattr(options, "node_metadata_key_filter"):
        options.node_metadata_key_filter = None  # passes read module paths
    return GraphPickler.dumps(value, options)


def graph_from_bytes(data: bytes) -> Any:
    """The value that `graph_bytes` wrote; its fake tensors are of one new mode."""
    from torch.fx._graph_pickler import GraphPickler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch reads its own deprecated names
        return GraphPickler.loads(data, FakeTensorMode())
