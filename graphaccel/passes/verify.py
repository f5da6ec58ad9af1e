"""Check after a pass that graphs are valid and match what their program states of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import fx

from graphaccel.compat.torch.graphs import is_deferred
from graphaccel.ir.program import StageProgram, Value
from graphaccel.ir.values import returned
from graphaccel.passes.context import Context

_FROM_FORWARD = ("saved", "joined", "summed", "same")  # kinds of inputs that a forward returns


class InvalidGraph(AssertionError):
    """A pass left a graph that differs from what its program states: a bug of the pass."""


def check_counts(context: Context) -> None:
    """Every graph of a program has as many inputs and results as the program states.

    Costs next to nothing; does not build graphs that are built lazily. Raises InvalidGraph.
    """
    for program in (*context.programs, *context.weights):
        for name, graph, inputs, outputs in _phases(program):
            if is_deferred(graph):
                continue
            given = len(graph.graph.find_nodes(op="placeholder"))
            if given != len(inputs):
                _refuse(program, name, f"{given} inputs where the program states {len(inputs)}")
            built = len(returned(graph))
            if built != len(outputs):
                _refuse(program, name, f"{built} results where the program states {len(outputs)}")


def check_graphs(context: Context) -> None:
    """Every graph is one that fx accepts, with unique names, a value on every call and no dead
    code; every value that a phase takes from the forward is one that the forward returns.

    Reads every node: `GRAPHACCEL_VERIFY` and the tests ask for it. Raises InvalidGraph.
    """
    for name, graph in context.graphs.items():
        if not is_deferred(graph):
            _check_nodes(name, graph.graph)
    for program in context.programs:
        saved = _names(program.forward_outputs)
        _check_saved(program, "backward", program.backward_inputs, saved)
        _check_saved(program, "head", program.head_inputs, saved)
        later = saved | _names(program.backward_outputs)
        _check_saved(program, "weight", program.weight_inputs, later)


def _check_nodes(name: str, graph: fx.Graph) -> None:
    try:
        graph.lint()
    except RuntimeError as error:
        raise InvalidGraph(f"{name}: {error}") from error
    seen: set[str] = set()
    for node in graph.nodes:
        if node.name in seen:
            raise InvalidGraph(f"{name}: two nodes are called {node.name}")
        seen.add(node.name)
        if node.op == "call_function" and "val" not in node.meta:
            raise InvalidGraph(f"{name}: {node.name} has no value")
        if node.op == "call_function" and not node.users and not node.is_impure():
            raise InvalidGraph(f"{name}: nothing reads {node.name}")


def _check_saved(
    program: StageProgram, name: str, inputs: Sequence[Value], given: Collection[str]
) -> None:
    for value in inputs:
        if value.kind in _FROM_FORWARD and value.name not in given:
            _refuse(program, name, f"nothing saves its input {value.name}")
    counted = Counter((value.kind, value.name, value.leaf) for value in inputs)
    twice = [key for key, count in counted.items() if count > 1]
    if twice:
        _refuse(program, name, f"it has the input {' '.join(map(str, twice[0]))} twice")


def _names(values: Iterable[Value]) -> set[str]:
    return {value.name for value in values if value.kind in _FROM_FORWARD}


def _phases(
    program: StageProgram,
) -> Iterable[tuple[str, fx.GraphModule, Sequence[Value], Sequence[Value]]]:
    yield "forward", program.forward, program.forward_inputs, program.forward_outputs
    for graph in program.backwards.values():
        yield "backward", graph, program.backward_inputs, program.backward_outputs
    for graph in program.weights.values():
        yield "weight", graph, program.weight_inputs, program.weight_outputs
    if program.prepare is not None:
        yield "prepare", program.prepare, program.prepare_inputs, program.prepare_outputs
    if program.head is not None:
        yield "head", program.head, program.head_inputs, program.head_outputs


def _refuse(program: StageProgram, name: str, reason: str) -> None:
    raise InvalidGraph(f"stage {program.stage} {name}: {reason}")
