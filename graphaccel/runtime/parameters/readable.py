"""What Python reads of a tensor without an operator: numbers, lists, arrays and text.

torch reads the memory of a tensor for these, or refuses a subclass. A tensor of which this rank
holds a part, or nothing, has no memory of its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from graphaccel.errors.messages import line_of_script
from graphaccel.runtime.execution.answers import unanswered
from graphaccel.runtime.execution.lost_rank import is_connection

T = TypeVar("T")


def read_by_all(collective: Callable[[], T]) -> T:
    """What a collective returns that a script's line asks for. Raises RankLost (GA501) where other
    ranks do not take part, as they do not in what is below `if rank == 0`."""
    try:
        return collective()
    except RuntimeError as error:
        if not is_connection(error):
            raise
        line = line_of_script()
        where = "the script" if line is None else f"{line.file}:{line.line}"
        waiting = f"all parts of a tensor, whose values {where} reads"
        raise unanswered(error, waiting, "the step before") from error


class Readable:
    """Tensors that are read through `values()`.

    The numbers are here for `torch.tensor([p.grad.norm() for p in ...])`, which asks for them where
    no subclass is called for an operator.
    """

    requires_grad: bool
    dim: Callable[[], int]

    def values(self) -> torch.Tensor:
        """The plain tensor that the user means."""
        raise NotImplementedError

    def __float__(self) -> float:
        return float(self.values())

    def __int__(self) -> int:
        return int(self.values())

    def __index__(self) -> int:
        return self.values().__index__()

    def __complex__(self) -> complex:
        return complex(self.values())

    def __format__(self, spec: str) -> str:
        return format(self.values(), spec) if spec else str(self)

    def __str__(self) -> str:
        """A number is shown; of a tensor with dims what it is, since its text may be made on one
        rank, which can not gather it."""
        return repr(self) if self.dim() else str(self.values())

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`."""
        return self.values().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`. What is written into the array does not reach a tensor on a CPU,
        as it does in plain code: there it is for reading."""
        values = self.values().detach()
        array = values.requires_grad_(self.requires_grad).numpy(force=force)
        array.flags.writeable = values.device.type != "cpu"
        return array
