"""Inductor: a graph as compiled code, and what it needs to compile for the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.onednn import onednn_linear, opaque_linear


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], settings: Mapping[str, Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph as code by Inductor; it is called with a list of tensors, which it empties.

    module: functional, returns a tuple of tensors. inputs: fake tensors of `fakes_like`. settings:
    of `torch._inductor.config`. Inductor caches compiled code on disk, by the hash of the graph
    (TORCHINDUCTOR_CACHE_DIR). Raises whatever Inductor raises.
    """
    from torch._inductor import standalone_compile  # seconds

    for node in module.graph.find_nodes(op="call_function", target=onednn_linear()):
        # Inductor's lowering of it asserts that the weight is a constant.
        node.target, node.args = opaque_linear(), node.args[:3]
    module.recompile()
    if inputs:
        for node in module.graph.output_node().all_input_nodes:
            node.meta["example_value"] = inputs[0]  # Inductor reads its mode
    options = {"config_patches": dict(settings)}
    compiled = standalone_compile(
        module, list(inputs), dynamic_shapes="from_graph", options=options
    )
    run = getattr(compiled, "_compiled_fn", None)
    while run is not None:  # inside, one that takes a list, and so frees inputs at their last use
        code = getattr(run, "__code__", None)
        if code is not None and code.co_argcount == 1 and not code.co_flags & inspect.CO_VARARGS:
            return run
        run = getattr(run, "__wrapped__", None)
    return lambda values: compiled(*values)


def missing_cpp_compiler() -> str | None:
    """Why Inductor can not compile for the CPU here, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        return str(error)
    return None
