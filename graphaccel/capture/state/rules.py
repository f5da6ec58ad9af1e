"""Runs the gradient rules of a forward that are written in Python, to see what they read: the
backward of a `torch.autograd.Function`, and hooks on tensors."""

from __future__ import annotations

import torch
from torch import nn

from graphaccel.capture.export.recorded import functions_behind
from graphaccel.capture.export.reports import without_reports
from graphaccel.capture.state.carried import Ops
from graphaccel.compat.torch.fakes import FakeTensor
from graphaccel.guards.reads import Reads


def run_rules(model: nn.Module, reads: Reads, ops: Ops) -> None:
    """Differentiate what a forward on tensors without data returned, where it has such rules; what
    they read is recorded in `reads`."""
    results = [x for x in ops.returned if isinstance(x, torch.Tensor) and x.requires_grad]
    ops.returned = ()
    if not results or not (ops.hooked or any(functions_behind(results))):
        return
    trained = [p for p in nn.Module.parameters(model) if p.requires_grad]
    fake = next(p for p in trained if isinstance(p, FakeTensor)).fake_mode
    one_thread = torch.autograd.set_multithreading_enabled(False)  # the one that is observed
    try:
        with without_reports(), fake, one_thread, Ops(), reads.differentiating():
            torch.autograd.grad([x.sum() for x in results], trained, allow_unused=True)
    except Exception:  # whatever a rule raises when it needs a value; capture reports it
        return
