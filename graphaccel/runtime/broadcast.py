"""Broadcasts from one rank to all: weights and random state, the capture, and the plan.

On a machine whose ranks share few cores, computing the same on all ranks at once takes that many
times longer.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.capture.transport import packed, unpacked
from graphaccel.errors import GraphMisuse
from graphaccel.planner.plan.plan import Plan
from graphaccel.progress import progress
from graphaccel.runtime import digest
from graphaccel.runtime.deferred import share_record
from graphaccel.runtime.execution.answers import answered, from_all, from_first
from graphaccel.runtime.init_tape import InitTape

log = logging.getLogger("graphaccel.runtime")

_LONGEST = timedelta(days=7)
"""That one rank captures and plans for all; its end closes the connections of the others."""

_MODELS, _COMPARED = "the models of all ranks", "comparing models and batches"


def same_on_all_ranks(
    model: nn.Module,
    count: int,
    initial: InitTape | None = None,
    device: torch.device | None = None,
) -> None:
    """Give every rank the weights and random state of rank 0: replicas and shuffles must not
    differ. Prints a line where weights differed on some rank.

    initial: for a model without weights, how they will be initialised: from rank 0's random states.
    device: the device to send from, a tensor at a time, where the weights are elsewhere.

    Raises GraphMisuse (GA407) where the models have different parameters or buffers; nothing is
    changed then.
    """
    if count == 1:
        return
    said = from_all(depends_on(model, None, None), _MODELS)
    if len(set(said)) > 1:
        other = next(rank for rank, described in enumerate(said) if described != said[0])
        raise GraphMisuse(
            what=f"the model of rank {other} is not that of rank 0: they differ in modules, "
            "parameters, buffers or modes",
            help_line="build the same model on every rank",
        )
    others = _ranks_that_differ(model, count)
    if others:
        named = ", ".join(map(str, others))
        progress("weights", f"rank 0's, on every rank: others had rank {named}", 0.0)
    if initial is not None:
        share_record(initial)
    tensors = (*nn.Module.parameters(model), *model.buffers()) if initial is None else ()
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.detach().contiguous().to(device or tensor.device)
            with answered("the weights of rank 0"):
                dist.broadcast(data, 0)
            if data.data_ptr() != tensor.data_ptr():
                tensor.copy_(data)
    states = (torch.random.get_rng_state(), random.getstate(), np.random.get_state())
    states = from_first(states, "the random states of rank 0")
    torch.random.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def refuse_other_weights(model: nn.Module, count: int) -> None:
    """Check before the first step that all `count` ranks start from the same weights. Collective.

    Weights must still be full on every rank.

    Raises GraphMisuse (GA407) on every rank where some rank's weights are not rank 0's.
    """
    others = _ranks_that_differ(model, count)
    if others:
        raise GraphMisuse(
            what=f"rank {others[0]}'s weights are not rank 0's: some ranks wrote theirs alone "
            "after optimize()",
            help_line="write them on every rank:  model.load_state_dict(torch.load(path))",
        )


def _ranks_that_differ(model: nn.Module, count: int) -> list[int]:
    """Ranks whose parameters and buffers have other values than rank 0's."""
    tensors = [
        t.detach() for t in (*nn.Module.parameters(model), *model.buffers()) if not t.is_meta
    ]
    if count == 1:
        return []
    here = digest.of_host(t for t in tensors if t.device.type == "cpu")
    there = [t for t in tensors if t.device.type != "cpu"]
    said = from_all(
        (here, int(digest.of_device(there)) if there else 0), "the weights of all ranks"
    )
    return [rank for rank, values in enumerate(said) if values != said[0]]


def share_capture(
    known: bool,
    depends: str,
    capture: Callable[[], StepGraph],
    keep: Callable[[StepGraph], None],
) -> None:
    """Let one rank call `capture` and the others `keep` its result; a collective (`_share`).

    A result that cannot be sent (an output of a class that pickle cannot find) only costs time.
    """

    def unpack(data: bytes) -> None:
        step = unpacked(data)
        if step is None:
            log.info("another rank's capture did not survive the way; capturing here too")
        else:
            keep(step)

    _share(known, depends, lambda: _packed(capture()), unpack)


def share_plan(
    known: bool, depends: str, choose: Callable[[], Plan], keep: Callable[[Plan], None]
) -> None:
    """Let one rank `choose` a plan and the others `keep` it; a collective (`_share`)."""
    _share(known, depends, lambda: pickle.dumps(choose()), lambda data: keep(pickle.loads(data)))


def _share(
    known: bool, depends: str, make: Callable[[], bytes | None], keep: Callable[[bytes], None]
) -> None:
    """Let one rank `make` what all need, and the others `keep` it.

    known: this rank has it already. depends: digest of what it depends on. Does nothing where all
    ranks have it, or where they differ in what it depends on. A rank that receives nothing makes it
    itself, and raises its own error if that fails. However long it takes, the timeout does not
    count: it is for ranks that do not answer. Raises RankLost (GA501) where the one that makes it
    is gone.
    """
    said = from_all((known, depends), _MODELS)
    if all(has for has, _ in said) or len({described for _, described in said}) > 1:
        return
    source = next((rank for rank, (has, _) in enumerate(said) if has), 0)
    patient: Any = dist.new_group(backend="gloo", timeout=_LONGEST)
    data: list[bytes | None] = [None]
    if dist.get_rank() == source:
        try:
            data[0] = make()
        finally:  # the others wait, even if this rank raises
            with answered("the others, for which it captures and plans", done=_COMPARED):
                dist.broadcast_object_list(data, source, group=patient)
    else:
        waiting, lost = f"the capture and plan of rank {source}", f"rank {source}"
        with answered(waiting, done=_COMPARED, lost=lost):
            dist.broadcast_object_list(data, source, group=patient)
    dist.destroy_process_group(patient)
    if not known and dist.get_rank() != source and data[0] is not None:
        keep(data[0])


def depends_on(model: nn.Module, signature: object, loss: object) -> str:
    """A digest of what a capture depends on that could differ between two ranks: the model's
    modules, parameters and modes, and the batch's signature."""
    parts: list[object] = [signature, getattr(loss, "__qualname__", loss)]
    parts += [(name, type(m).__qualname__, m.training) for name, m in model.named_modules()]
    for named in (model.named_parameters, model.named_buffers):
        parts += [
            (name, tuple(t.shape), str(t.dtype), t.requires_grad)
            for name, t in named(remove_duplicate=False)
        ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _packed(step: StepGraph) -> bytes | None:
    try:
        return packed(step)
    except Exception as error:  # pickle raises any exception that the user's classes raise
        log.info("each rank captures by itself: the capture can not be sent: %s", error)
        return None
