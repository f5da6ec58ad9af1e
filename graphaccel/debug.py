"""Finds the first node at which a captured graph differs from eager: `import graphaccel.debug`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphaccel.capture.export.export import LossFn
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import as_batch, check_supported, model_of
from graphaccel.proof.comparison import pair_of
from graphaccel.proof.first_step import Proof, examine
from graphaccel.proof.locate import Difference

__all__ = ["Bisection", "bisect"]


@dataclass(frozen=True)
class Bisection:
    """The result of comparing a captured graph with eager code.

    equal: whether they were compared and every value equals eager's. said: the printed summary.
    values: what differs, a sentence each. node: the first node of the graph that differs; None
    where no node does, as where a gradient is missing.
    """

    equal: bool
    said: str
    values: tuple[str, ...] = ()
    node: Difference | None = None

    def __str__(self) -> str:
        lines = [self.said, *(f"  {value}" for value in self.values)]
        if self.node is not None:
            lines.append(f"begins at {self.node}")
            if self.node.location is not None:
                lines += self.node.location.lines("")
        return "\n".join(lines)


def bisect(model: nn.Module, batch: Any, loss_fn: LossFn = None) -> Bisection:
    """Capture a training step of `model`, run it beside plain autograd, and print and return the
    first node that differs, with its module and the user's source line.

    batch: as for `optimize(example_batch=)`: a mapping is passed as keywords, a sequence by
    position.
    loss_fn: as for `optimize`. A few rows of the batch are compared, or all rows where the batch
    dim is not known. The model is not changed.

    Raises what capture raises (GA101, GA102), GraphMisuse (GA407) where this rank does not hold the
    full weights, and what the model raises in eager code.
    """
    check_supported(model)
    captures = Captures(model_of(model, loss_fn, None, next(model.parameters()).device.type))
    built = as_batch(batch)
    step, sizes = captures.of(built)
    match = examine(pair_of(model, loss_fn, step, built, sizes))
    if isinstance(match, Proof):
        result = Bisection(match.proved, match.text)
    else:
        rows = match.setting.rows
        where = "the batch" if rows is None else f"{rows} rows of the batch"
        said = f"on {where} the captured graph differs from eager:"
        result = Bisection(False, said, match.values, match.begins)
    print(result, file=sys.stderr)
    return result
