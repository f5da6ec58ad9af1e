"""Completes a batch that a plan cannot split evenly, with rows that change no result.

A row is ignored where one input marks it so throughout: labels that hold the loss's `ignore_index`,
a mask of zeros that multiplies the loss of each row. Whether that holds is derived from the
captured forward: the values of such rows are followed from op to op, up to the sums over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from graphaccel.capture.batch import Batch, batch_size, has_dims, resized
from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.compiler.calls_by_size import same_plain
from graphaccel.errors import BatchNotDivisible
from graphaccel.ir.values import operands, returned
from graphaccel.passes.microbatch.exact_microbatch import batch_placement, is_quantity
from graphaccel.planner.plan.plan import Plan
from graphaccel.sharding.rules.batch_placement import BatchPlacement
from graphaccel.sharding.rules.shard import Shard

aten = torch.ops.aten

_VIEWS = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default,
    aten.flatten.using_ints, aten.permute.default, aten.reshape.default, aten.select.int,
    aten.slice.Tensor, aten.squeeze.default, aten.squeeze.dim, aten.t.default,
    aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default,
}  # fmt: skip
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_ZERO_IF_ANY = {aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor}
_EQUAL = {aten.ne.Scalar, aten.eq.Scalar}
_INDEXED = {  # op → its table, its indices
    aten.embedding.default: (0, 1), aten.gather.default: (0, 2), aten.index_select.default: (0, 2),
}  # fmt: skip
_ORDERED = {aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar}


@dataclass(frozen=True)
class IgnoredRows:
    """How rows are marked so that they add nothing to loss, gradients and buffers.

    leaf, value: input of the batch, and what it holds in such a row; leaf None where the script
    computes the loss, from the outputs of the other rows. outputs: leaf of the model's output → the
    dim that has the rows, and its size; a leaf that is missing has no rows.
    """

    leaf: int | None
    value: float
    outputs: Mapping[int, tuple[int, Any]]


@dataclass(frozen=True)
class Completed:
    """A batch with ignored rows at its end. sizes: symbolic sizes of the batch without them."""

    step: StepGraph
    rows: IgnoredRows
    size: int
    sizes: Mapping[sympy.Symbol, int]

    def line(self, batch: Batch) -> str:
        """What is done to the batch, for the user."""
        rows = self.rows
        mark = "" if rows.leaf is None else f" ({batch.names[rows.leaf]} = {rows.value:g})"
        size = self.sizes[BATCH]
        return f"{size} rows are completed to {self.size} with rows that add nothing{mark}"

    def leaves(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of the batch, each with its first row repeated up to `size`, and marked."""
        built = list(leaves)
        for leaf, dim in self.step.batch_dims.items():
            tensor = built[leaf]
            more = self.size - tensor.shape[dim]
            added = tensor.detach().narrow(dim, 0, 1)
            if leaf == self.rows.leaf:
                added = torch.full_like(added, self.rows.value)
            whole = torch.cat([tensor, added.repeat_interleave(more, dim)], dim)
            built[leaf] = whole
        return tuple(built)

    def cut(self, outputs: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Output leaves without the ignored rows."""
        built = dict(outputs)
        for leaf, (dim, size) in self.rows.outputs.items():
            if leaf in built:
                built[leaf] = built[leaf].narrow(dim, 0, int(evaluate(size, self.sizes)))
        return built


def completed(
    planned: StepGraph,
    plan: Plan,
    batch: Batch,
    captured: Callable[[Batch], StepGraph],
    besides: Callable[[StepGraph, Batch], Mapping[int, Any]],
) -> Completed | None:
    """How a batch of a size that the plan cannot split is completed; None where it can be split.

    planned: the step that the plan was made for. captured: gives the step of a batch. besides:
    what a step returns of a batch besides tensors. A batch smaller than the planned one gets its
    size.

    Raises BatchNotDivisible (GA206) where ignored rows would change the result.
    """
    dims, parts = planned.batch_dims, plan.data * plan.microbatches
    if parts == 1 or not has_dims(batch, dims) or BATCH not in planned.sizes:
        return None
    size = batch_size(batch, dims)
    if size == 0 or size % parts == 0:
        return None
    wanted = plan.batch if size < plan.batch else -(-size // parts) * parts
    whole = resized(batch, dims, wanted)
    step = captured(whole)
    result = ignored_rows(step)
    if not same_plain(besides(step, batch), besides(step, whole)):
        result = "what the model returns besides tensors depends on the number of rows"
    if isinstance(result, str):
        raise _refused(plan, size, result)
    sizes = {**step.sizes_of(batch), BATCH: size}
    return Completed(step, result, wanted, sizes)


def check_last(planned: StepGraph, plan: Plan, size: int, left_out_by: str) -> None:
    """Ask about the last batch of each epoch, of `size` rows, before it comes.

    left_out_by: the argument that leaves it out.

    Raises BatchNotDivisible (GA206) where it can neither be split nor completed.
    """
    if BATCH not in planned.sizes or size % (plan.data * plan.microbatches) == 0:
        return
    result = ignored_rows(planned)
    if isinstance(result, str):
        raise _refused(plan, size, result, left_out_by)


def _refused(plan: Plan, size: int, reason: str, left_out_by: str = "") -> BatchNotDivisible:
    return BatchNotDivisible(
        batch=size,
        microbatches=plan.microbatches,
        data=plan.data,
        allowed=tuple(n for n in range(1, size + 1) if size % (n * plan.data) == 0),
        reason=reason,
        left_out_by=left_out_by,
    )


def with_rows(batch: Batch, more: Completed) -> Batch:
    """The batch with its ignored rows."""
    return replace(batch, leaves=more.leaves(batch.leaves))


def ignored_rows(step: StepGraph) -> IgnoredRows | str:
    """How rows of a step's batch are marked as ignored, or why none can be; cached."""
    few = step if step.repeats is None else step.repeats.short
    return few.analyses.cached((), _find, few)


def _find(step: StepGraph) -> IgnoredRows | str:
    placed = batch_placement(step)
    if placed.conflicts or placed.head:
        return "it has an op that needs all examples at once"
    if not step.has_loss:
        result = _outputs(step, _follow(step, placed, None, 0.0))
        return result if isinstance(result, str) else IgnoredRows(None, 0.0, result)
    reason = "its loss has no input that marks a row as ignored"
    for leaf, value in _candidates(step):
        states = _follow(step, placed, leaf, value)
        loss = next(
            n for o, n in zip(step.outputs, returned(step.graph), strict=True) if o.kind == "loss"
        )
        if states[loss].kind != "clean":
            continue
        result = _outputs(step, states)
        if not isinstance(result, str):
            return IgnoredRows(leaf, value, result)
        reason = result
    return reason


def _candidates(step: StepGraph) -> Iterator[tuple[int, float]]:
    """Leaves with rows, and values that could mark one: those that the graph compares with, or on
    either side of them, and zero."""
    values: list[float] = []
    for node in step.graph.graph.nodes:
        if node.target is aten.nll_loss_forward.default:
            values.append(node.args[4])
        elif node.target in _EQUAL and isinstance(node.args[1], (int, float)):
            values.append(node.args[1])
        elif node.target in _ORDERED and isinstance(node.args[1], (int, float)):
            values += (node.args[1] - 1, node.args[1] + 1)
    leaves = [s.leaf for s in step.inputs if s.kind == "batch" and s.leaf in step.batch_dims]
    for value in dict.fromkeys((*values, 0)):
        for leaf in reversed(leaves):  # labels are usually last
            yield leaf, value


def _outputs(step: StepGraph, states: Mapping[fx.Node, _State]) -> dict[int, tuple[int, Any]] | str:
    """The dims of the model's outputs that have rows, or which result depends on all rows."""
    results: dict[int, tuple[int, Any]] = {}
    for spec, node in zip(step.outputs, returned(step.graph), strict=True):
        if spec.kind not in ("output", "buffer") or not isinstance(node, fx.Node):
            continue
        state = states.get(node, _CLEAN)
        if state.kind == "clean":
            continue
        dim = batch_placement(step).places.get(node)
        if spec.kind == "buffer":
            return f"its buffer {spec.name} depends on every row"
        if state.kind == "mixed" or not isinstance(dim, int):
            return f"its output {spec.leaf} depends on every row"
        results[spec.leaf] = dim, node.meta["dims"][dim]
    return results


class _State(NamedTuple):
    """What a value has of the ignored rows. kind: "clean", nothing; "rows", rows of its own, of
    which those hold `value` throughout, where that is known; "mixed", other rows depend on them."""

    kind: str
    value: float | None = None


_CLEAN, _ROWS, _MIXED = _State("clean"), _State("rows"), _State("mixed")


def _follow(
    step: StepGraph, placed: BatchPlacement, leaf: int | None, value: float
) -> dict[fx.Node, _State]:
    """The state of every forward value where `leaf` holds `value` in the ignored rows."""
    states: dict[fx.Node, _State] = {}
    specs = iter(step.inputs)
    for node in step.graph.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            rows = spec.kind == "batch" and spec.leaf in step.batch_dims
            states[node] = _ROWS if rows else _CLEAN
            if rows and spec.leaf == leaf:
                states[node] = _State("rows", value)
        elif node.op == "call_function" and node.meta.get("phase") == "forward":
            states[node] = _state(node, states, _has_rows(placed.places.get(node)))
    return states


def _has_rows(place: Any) -> bool:
    if isinstance(place, tuple):
        return any(map(_has_rows, place))
    return isinstance(place, (int, Shard)) and not isinstance(place, bool)


def _state(node: fx.Node, states: Mapping[fx.Node, _State], rows: bool) -> _State:
    """The state of one op's result, from those of its arguments. rows: whether it has rows."""
    given = [states[n] for n in node.all_input_nodes]
    if any(state.kind == "mixed" for state in given) or _counts_rows(node):
        return _MIXED
    if _is_outside(node, states):
        return _MIXED
    known = _nll_loss(node, states) if node.target is aten.nll_loss_forward.default else None
    if known is not None:
        return known
    if node.target is getitem and given[0].kind == "clean":
        return _CLEAN
    value = _value(node, states)
    if rows:
        return _State("rows", value)
    if all(state.kind == "clean" for state in given):
        return _State("clean", value)
    return _CLEAN if node.target in _SUMS and states[node.all_input_nodes[0]].value == 0 else _MIXED


def _counts_rows(node: fx.Node) -> bool:
    """Whether a number among the arguments is a number of rows, and not the size of a result."""
    expressions = node.meta.get("sizes", {})
    return any(
        BATCH in getattr(e, "free_symbols", ()) and is_quantity(node, i)
        for i, e in expressions.items()
    )


def _is_outside(node: fx.Node, states: Mapping[fx.Node, _State]) -> bool:
    """Whether the op reads from a table a row that it does not have, as an embedding whose indices
    are the labels too, which are marked by a negative number."""
    places: Any = _INDEXED.get(node.target)  # pyright: ignore[reportArgumentType]
    if places is None:
        return False
    table, index = (operands(node)[place] for place in places)
    value = states[index].value
    dim = operands(node)[1] if places[1] == 2 else 0
    rows = table.meta["val"].shape[dim]
    return value is not None and not 0 <= value < (rows if isinstance(rows, int) else value + 1)


def _nll_loss(node: fx.Node, states: Mapping[fx.Node, _State]) -> _State | None:
    """A loss of labels: nothing of rows whose labels are ignored."""
    _, target, _, reduction, ignored = operands(node)
    if states[target].value != ignored:
        return None
    return _State("rows", 0.0) if reduction == 0 else _CLEAN


def _value(node: fx.Node, states: Mapping[fx.Node, _State]) -> float | None:
    """What a result holds throughout in the ignored rows, or everywhere, where that is known."""
    values = [states[a].value if isinstance(a, fx.Node) else a for a in operands(node)]
    if node.target in _VIEWS:
        return values[0]
    if node.target is aten.constant_pad_nd.default:
        return values[0] if len(values) > 2 and values[0] == values[2] else None
    if node.target in _ZERO_IF_ANY and any(v is not None and v == 0 for v in values):
        return 0.0
    if node.target is aten.where.self and values[0] is not None:
        return values[1] if values[0] else values[2]
    if node.target is aten.masked_fill.Scalar and values[1] is not None:
        return values[2] if values[1] else values[0]
    if node.target in _SUMS:
        return 0.0 if values[0] == 0 else None
    if node.target is aten.mean.dim:
        return values[0]
    return _computed(node, states)


def _computed(node: fx.Node, states: Mapping[fx.Node, _State]) -> float | None:
    """The value of an elementwise op whose arguments are all known."""
    target: Any = node.target
    if target is aten.scalar_tensor.default:
        return operands(node)[0]
    if target in (aten.full.default, aten.full_like.default):
        return operands(node)[1]
    known = [states[n].value for n in node.all_input_nodes]
    if not known or any(value is None for value in known):
        return None
    if target is aten._to_copy.default:
        return torch.tensor(known[0]).to(node.meta["val"].dtype).item()
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return None

    def constant(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value: Any = states[argument].value
        return torch.full((), value, dtype=argument.meta["val"].dtype)

    return target(*map(constant, node.args), **dict(node.kwargs)).item()
