"""Proves before the first step, on a few rows, that the captured graph equals plain autograd.

Where they differ, training is refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.symbols import BATCH, evaluate
from graphaccel.compat.torch.ops import is_view
from graphaccel.errors import CaptureDiffers, GraphAccelError, StateFrozen
from graphaccel.ir.replication.layers import NotRepeated
from graphaccel.ir.values import tensors_of
from graphaccel.progress import progress
from graphaccel.proof.comparison import Pair, Setting, draws
from graphaccel.proof.evidence import Proof, judge
from graphaccel.proof.graph_step import GraphFailed
from graphaccel.proof.layers import FEW, few_layers, first_difference, layers
from graphaccel.proof.locate import Difference, difference_at, locate
from graphaccel.proof.recorded_draws import can_be_recorded
from graphaccel.proof.results import Deviation, Results, kept_of
from graphaccel.proof.sums import sums_of
from graphaccel.runtime.execution.answers import from_first

log = logging.getLogger("graphaccel.proof")

ROWS = 2
"""Batch rows that are compared: a size of 1 is special to many ops (it broadcasts)."""

_SEGMENTS = torch.ops.aten.segment_reduce.default
"""Reads rows by offsets that it does not check: past the end, where some rows are left out."""
_ROUGH = 1e-3
"""Bound in float32 where float64 is not available (a user's kernel without it)."""
_SHOWN = 8
_MEMORY = "not enough memory for eager and the graph on a few rows"


@dataclass(frozen=True)
class Differs:
    """values: what differs, a sentence each, in the setting in which it was observed. begins: the
    first node that differs, where a node does. note: what the names refer to, if not the model."""

    setting: Setting
    values: tuple[str, ...]
    begins: Difference | None
    note: str = ""

    def error(self) -> CaptureDiffers:
        """The difference as an error."""
        shown = self.values[:_SHOWN]
        if len(self.values) > _SHOWN:
            shown += (f"and {len(self.values) - _SHOWN} more",)
        shown += (self.note,) * bool(self.note)
        result = self.begins
        if result is None:
            return CaptureDiffers(values=shown, rows=self.setting.rows)
        return CaptureDiffers(
            values=shown,
            rows=self.setting.rows,
            node=result.node,
            op=result.op,
            phase=result.phase,
            module=result.module,
            location=result.location,
        )


def prove(pair: Pair | str) -> Proof:
    """Compare, and print the progress line about it. The user's model is not changed.

    Where nothing can be compared the line says why. pair: or why there is none.

    Raises CaptureDiffers (GA108), and what the user's model raises in eager code.
    """
    start = time.perf_counter()
    built = Proof(False, pair) if isinstance(pair, str) else examine(pair)
    if isinstance(built, Differs):
        raise built.error()
    progress("proved" if built.proved else "not proved", built.text, time.perf_counter() - start)
    return built


def prove_together(pair: Pair | str, ranks: int) -> Proof:
    """`prove` on rank 0 for all ranks, which raise what it raises. A collective."""
    if ranks == 1:
        return prove(pair)
    said: list[Any] = [None]
    here: Exception | None = None
    if dist.get_rank() == 0:
        try:
            said[0] = prove(pair)
        except GraphAccelError as error:
            said[0] = here = error
        except Exception as error:  # of the user's model; it may not survive pickling
            said[0], here = RuntimeError(f"rank 0: {type(error).__name__}: {error}"), error
    built, graph = said[0], None
    if isinstance(built, Proof):
        graph, said[0] = built.graph, replace(built, graph=None)
    said = [from_first(said[0], "the proof of the captured graph on rank 0")]
    if here is not None:
        raise here
    if isinstance(said[0], Exception):
        raise said[0]
    return replace(said[0], graph=graph)


def examine(pair: Pair) -> Proof | Differs:
    """Compare on a few rows, and on all rows where a few differ, or cannot prove anything.

    Raises what the user's model raises in eager code.
    """
    if any(p.is_meta for p in nn.Module.parameters(pair.subject.model)):
        text = "the model has no weights yet to compare with eager; it is compared when it has"
        return Proof(False, text, early=True)
    if pair.sizes.get(BATCH) == 0:
        return Proof(False, "the batch has no rows", retry=True)
    built = _examine(pair)
    if built is None and pair.of is None:
        try:
            pair = few_layers(pair)
        except NotRepeated as reason:
            return Proof(False, f"{_MEMORY}, and {reason}")
        built = _examine(pair)
    if built is None:
        return Proof(False, f"{_MEMORY} of a few layers")
    return built if pair.of is None else _of_all_layers(pair, pair.of, built)


def _of_all_layers(pair: Pair, step: StepGraph, proof: Proof | Differs) -> Proof | Differs:
    """What a comparison of a few layers says about all of them."""
    if isinstance(proof, Differs):
        return replace(proof, note=f"in the model with {FEW} of its {layers(step)} layers")
    if not proof.proved:
        return proof
    other = first_difference(step)
    if other is None:
        return replace(proof, text=f"block by block, {layers(step)} layers: {proof.text}")
    node = None if other.node is None else difference_at(replace(pair, step=step), other.node)
    return Differs(Setting(), (other.text,), node)


def _examine(pair: Pair) -> Proof | Differs | None:
    """Compare this model. None where memory does not suffice."""
    worst: Differs | Proof | None = None
    failed: GraphFailed | None = None
    for rows in _rows(pair):
        if not affordable(pair, Setting(rows)):
            return worst
        try:
            built = _verdict(pair, Setting(rows))
        except GraphFailed as error:
            if rows is None:
                failed = error
                break
            log.info("the graph of %d rows can not be run: %s", rows, error)
        except torch.OutOfMemoryError:
            return worst
        except Exception as error:  # a model may raise anything
            if rows is None and pair.gathered:
                reason = f"{type(error).__name__}: {error}"
                return Proof(False, f"eager code does not run on gathered weights: {reason[:200]}")
            if rows is None:
                raise
            log.info("%d rows can not be compared: %s", rows, error)
        else:
            if isinstance(built, Proof):
                if built.proved or not built.retry:
                    return built
                worst = worst or built
            else:
                setting, wrong = built
                worst = Differs(setting, tuple(map(str, wrong)), None)
    if failed is not None:
        return _failed(pair, failed)
    assert worst is not None
    if isinstance(worst, Proof):
        return worst
    return replace(worst, begins=locate(pair, worst.setting))


def _failed(pair: Pair, error: GraphFailed) -> Differs:
    """The difference where a graph cannot be run but eager code can.

    Raises what eager code raises where it cannot run this batch either.
    """
    pair.eager_runs()
    reason = next(iter(str(error).strip().splitlines()), "")
    values = (f"the graph can not be run: {reason[:200]}",)
    return Differs(Setting(), values, difference_at(pair, error.node))


def _rows(pair: Pair) -> Iterator[int | None]:
    """How many rows to try, in order: a few; then all, where a few are not conclusive."""
    size = pair.sizes.get(BATCH, 0)
    nodes = pair.step.forward.graph.graph.nodes
    unchecked = any(node.target is _SEGMENTS for node in nodes)
    if BATCH in pair.step.sizes and size > ROWS and pair.step.batch_dims and not unchecked:
        yield ROWS
    yield None


def _verdict(pair: Pair, setting: Setting) -> Proof | tuple[Setting, tuple[Deviation, ...]]:
    """A proof, or the setting in which values differ that should not, and which values.

    Raises what eager code or the graph raises.
    """
    rough: tuple[Deviation, ...] | None = None
    note = ""
    if not _narrow(pair):
        rough, kept = _rough(pair, setting)
        overflow = any(one.overflow and one.kind in ("loss", "gradient") for one in rough)
        if overflow:
            return _unsteady(pair, setting) or (setting, _wrong(rough))
        if not _wrong(rough):
            built = _judged(pair, rough)
            if not any(one.void == "not finite" for one in rough):
                return replace(built, graph=kept)
            note = f", in float64: otherwise {built.text}"
    wide = replace(setting, wide=True)
    try:
        result = pair.compare(wide) if affordable(pair, wide) else None
    except Exception as error:  # a user's kernel without float64
        log.info("no comparison in float64: %s", error)
        result = None
    if result is None:
        return _without_float64(pair, setting, rough)
    if not _wrong(result):
        return _judged(pair, result, note)
    if draws(pair.step):
        matched = replace(wide, by_shape=True)
        matched_step = pair.compare(matched)
        if not _wrong(matched_step):
            return _judged(pair, matched_step, ", draws matched by shape" + note)
        wide, result = matched, matched_step
    return _unsteady(pair, wide) or (wide, _wrong(result))


def _rough(pair: Pair, setting: Setting) -> tuple[tuple[Deviation, ...], Results | None]:
    """Deviations in the model's own precision; and sums of what the graph gave, where a training
    step gives the same."""
    kept: list[Results] = []
    if setting.rows is not None or pair.of is not None:
        return pair.compare(setting), None
    if not draws(pair.step):
        result = pair.compare(setting, lambda graph: kept.append(kept_of(graph, sums_of)))
        return result, kept[0]
    if can_be_recorded(pair.step.graph.graph):
        same = pair.compare_step(lambda graph: kept.append(kept_of(graph, sums_of)))
        if same is not None and not _wrong(same):
            return same, kept[0]
    return pair.compare(setting), None


def _without_float64(
    pair: Pair, setting: Setting, rough: tuple[Deviation, ...] | None
) -> Proof | tuple[Setting, tuple[Deviation, ...]]:
    if rough is None:
        return Proof(False, "its precision is low, and float64 can not be had")
    if all(one.error <= _ROUGH for one in rough):
        return _judged(pair, rough)
    return _unsteady(pair, setting) or (setting, _wrong(rough))


def _unsteady(pair: Pair, setting: Setting) -> Proof | None:
    """A Proof that nothing can be compared, where eager code does not agree with itself.

    Raises StateFrozen (GA106) where it differs by more than rounding.
    """
    wrong = _wrong(pair.compare_eager(setting))
    if not wrong:
        return None
    worst = max(wrong, key=lambda one: one.error)
    if worst.error > _ROUGH:
        raise StateFrozen(
            what=f"two forwards on one batch, with one random state, differ: {worst}",
            reason="a captured graph gives one result for the same inputs, and would train on what "
            "was so at its capture",
            help_lines=("pass what changes from call to call to the forward, as an argument",),
        )
    return Proof(False, f"eager differs from itself from run to run: {wrong[0]}")


def _judged(pair: Pair, deviations: tuple[Deviation, ...], note: str = "") -> Proof:
    trained = pair.step.training and bool(pair.step.trainable)
    return judge(deviations, trained=trained, note=note)


def _wrong(deviations: tuple[Deviation, ...]) -> tuple[Deviation, ...]:
    return tuple(one for one in deviations if one.wrong)


def _narrow(pair: Pair) -> bool:
    """Whether something is computed in 16 bits, where rounding hides differences."""
    narrow = (torch.bfloat16, torch.float16)
    return any(
        t.dtype in narrow
        for node in pair.step.graph.graph.nodes
        for t in tensors_of(node.meta.get("val"))
    )


def affordable(pair: Pair, setting: Setting) -> bool:
    """Whether half of the free memory holds the activations of these rows, the graph's gradients
    and eager's; in float64 also the parameters."""
    sizes = dict(pair.sizes)
    if setting.rows is not None:
        sizes[BATCH] = setting.rows
    model = pair.subject.model
    weights, free = _bytes_of(model), free_memory(model, pair.subject.device, pair.held)
    if 2 * weights > free / 2:  # without iterating over the nodes, of which there may be very many
        return False
    kept = sum(_bytes(node, sizes) for node in pair.step.graph.graph.nodes)
    need = 6 * weights + 2 * kept if setting.wide else 2 * weights + kept
    return need <= free / 2


def room_for_weights(model: nn.Module, device: torch.device, copies: int) -> bool:
    """Whether half of the memory of a device holds so many copies of a model's weights."""
    return copies * _bytes_of(model) <= free_memory(model, device, 0) / 2


def _bytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in nn.Module.parameters(model))


def free_memory(model: nn.Module, device: torch.device, held: int) -> int:
    """Bytes of memory beside the weights of a model and `held`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - _bytes_of(model) - held


def _bytes(node: fx.Node, sizes: dict) -> int:
    """Bytes of a forward node's outputs."""
    if node.op != "call_function" or node.meta.get("phase") != "forward":
        return 0
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_view(node):
        return 0
    count = 1
    for dim in node.meta["dims"]:
        count *= int(evaluate(dim, sizes))
    return count * value.element_size()
