"""Parse graph text: the inverse of `graph_text(notes=True)`.

    %x: f32[8,64] = input
    %t: f32[64,8] = aten.t(%x)    # forward proj by recompute
    return (%t)

Every node gets a fake value: inputs and constants a contiguous one of the stated type, calls the
result of their op on those, with its strides and shared storage. Packages that define custom ops
have to be imported first. What the text does not state is lost: strides of inputs, data of
constants, origins and source lines, which number of a call depends on a rank's coordinate. Tuples
are read as lists.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphaccel.compat.torch.fakes import FakeTensorMode
from graphaccel.compat.torch.graphs import graph_module
from graphaccel.ir.nodes import new_node
from graphaccel.ir.text import DTYPES, target_text, type_text

_NAMED = {short: dtype for dtype, short in DTYPES.items()}
_WORDS: Mapping[str, Any] = {"None": None, "True": True, "False": False}
_LINE = re.compile(r"%(?P<name>\w+)(?:: (?P<type>.*?))? = (?P<call>.*)", re.DOTALL)
_CALL = re.compile(r"(?P<target>[\w.]+)\((?P<arguments>.*)\)", re.DOTALL)
_TENSOR = re.compile(r"(?P<dtype>[\w.]+)\[(?P<shape>[\d,]*)\]")
_KEYWORD = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_DEVICE = re.compile(r"(cpu|cuda|meta)(:\d+)?")
_PHASES = ("input", "forward", "backward", "output")
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def parse_graph(text: str, mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """The graph that a text states, with meta "val", "phase", "module" and "made_by" on its nodes.

    mode: the fake mode of its values, for several graphs that are rewritten together; a new one by
    default.

    Raises ValueError, with the number of the line, for malformed text, for an op that torch does
    not have, and where the stated type of a call is not that of its op's result.
    """
    return _Parser(mode or FakeTensorMode()).module(text)


class _Parser:
    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.root = torch.nn.Module()

    def module(self, text: str) -> fx.GraphModule:
        """The module of the full text; empty lines and comments are skipped."""
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                self._line(line)
            except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
                raise ValueError(f"line {number}: {error}: {line.strip()}") from error
        module = graph_module(self.root, self.graph)
        module.graph.lint()
        return module

    def _line(self, line: str) -> None:
        if line.startswith("return ("):
            results = _split(line.strip()[len("return (") : -1])
            node = self.graph.output([self._value(r) for r in results])
            node.meta["phase"] = "output"
            return
        body, _, notes = line.partition("    # ")
        match = _LINE.fullmatch(body.strip())
        if match is None:
            raise ValueError("neither a node nor a return")
        name, call = match["name"], match["call"]
        meta = _notes(notes)
        if call in ("input", "constant"):
            value = self._typed(match["type"])
            node = self._given(name, value, constant=call == "constant")
            node.meta |= {"phase": "input", "val": value} if match["type"] else {"phase": "input"}
        else:
            node = self._call(name, call)
            if match["type"] is not None:
                node.meta["val"] = self._result(node, match["type"])
        node.meta |= meta
        if node.name != name:
            raise ValueError(f"a node can not be called {name}")
        self.nodes[name] = node

    def _given(self, name: str, value: Any, *, constant: bool) -> fx.Node:
        if not constant:
            return new_node(self.graph, "placeholder", name, (), {}, name, {})
        self.root.register_buffer(name, value)
        return self.graph.create_node("get_attr", name, name=name)

    def _call(self, name: str, call: str) -> fx.Node:
        match = _CALL.fullmatch(call)
        if match is None:
            raise ValueError("no call")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for part in _split(match["arguments"]):
            named = _KEYWORD.fullmatch(part)
            if named is None:
                args.append(self._value(part))
            else:
                kwargs[named["name"]] = self._value(named["value"])
        target = _target(match["target"])
        return new_node(self.graph, "call_function", target, tuple(args), kwargs, name, {})

    def _value(self, text: str) -> Any:
        """One argument: a node, a list, a dtype, a device, a number or a word."""
        if text.startswith("%"):
            if text[1:] not in self.nodes:
                raise ValueError(f"{text} is not defined above")
            return self.nodes[text[1:]]
        if text.startswith("[") and text.endswith("]"):
            return [self._value(part) for part in _split(text[1:-1])]
        if text.startswith("slice(") and text.endswith(")"):
            return slice(*(self._value(part) for part in _split(text[len("slice(") : -1])))
        return _plain(text)

    def _typed(self, text: str | None) -> Any:
        """A fake value of a stated type."""
        if text is None:
            return None
        if text.startswith("(") and text.endswith(")"):
            return tuple(self._typed(part) for part in _split(text[1:-1]))
        match = _TENSOR.fullmatch(text)
        if match is None:
            return _plain(text)
        shape = [int(size) for size in match["shape"].split(",") if size]
        with self.mode:
            return torch.empty(shape, dtype=_dtype(match["dtype"]))

    def _result(self, node: fx.Node, stated: str) -> Any:
        """The result of a call on the values of its arguments, which must have the stated type."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        if node.target is _WAIT:  # it returns the tensor that it waited for
            value = args[0]
        else:
            with self.mode, torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        if type_text(value) != stated:
            raise ValueError(f"{target_text(node.target)} gives {type_text(value)}")
        return value


def _notes(text: str) -> dict[str, str]:
    """Metadata from the comment of a line: phase, module, and the pass after "by"."""
    plain, marked, built_by = f" {text}".partition(" by ")
    words = plain.split()
    result = {"made_by": built_by.strip()} if marked else {}
    if words and words[0] in _PHASES:
        result["phase"] = words.pop(0)
    if words:
        result["module"] = words[0]
    return result


def _split(text: str) -> list[str]:
    """The parts of a list of arguments: between commas that no bracket encloses."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if depth == 0 and text.startswith(", ", at):
            parts.append(text[start:at])
            start = at = at + 2
            continue
        depth += (text[at] in "[(") - (text[at] in "])")
        at += 1
    return [*parts, text[start:]] if parts or text else []


def _plain(text: str) -> Any:
    """A word, a number, a dtype, a device, a torch constant; anything else is a string."""
    if text in _WORDS:
        return _WORDS[text]
    if text in _NAMED:
        return _NAMED[text]
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    if _DEVICE.fullmatch(text):
        return torch.device(text)
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _dtype(text: str) -> torch.dtype:
    result = _plain(text)
    if not isinstance(result, torch.dtype):
        raise ValueError(f"{text} is no dtype")
    return result


def _target(text: str) -> Any:
    """The op or the operator with this name."""
    path = text.split(".")
    if len(path) == 1:
        if not hasattr(operator, text):
            raise ValueError(f"there is no operator {text}")
        return getattr(operator, text)
    try:
        packet = getattr(getattr(torch.ops, path[0]), path[1])
        return getattr(packet, path[2] if len(path) == 3 else "default")
    except (AttributeError, IndexError) as error:
        raise ValueError(f"there is no op {text}") from error
