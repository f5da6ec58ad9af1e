"""The arguments of `optimize`, completed by a library's own, and the ranks that they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphaccel.api import start_ranks
from graphaccel.arguments import read_plan
from graphaccel.errors import GraphMisuse
from graphaccel.runtime.execution.answers import answered, from_all
from graphaccel.runtime.parameters.remote import RemoteTensor


def started(settings: Mapping[str, Any]) -> tuple[dict[str, Any], torch.device]:
    """Make this process one of the ranks that `settings` ask for, the arguments of `optimize`.

    Returns them with the number of devices, and this rank's device.

    Raises GraphMisuse (GA407) for `batch="local"`: these libraries then hand the same rows to all
    ranks, and values that they log or compare would be those of a rank's own rows.
    """
    if settings.get("batch") == "local":
        raise GraphMisuse(
            what="batch='local', but under this library every rank reads the same batches",
            help_line="leave it out, and a DistributedSampler too: the plan splits the batches "
            "that one device reads",
            other_help="to keep the sampler, in a loop of your own:  "
            "graphaccel.optimize(model, optimizer, batch='local')",
        )
    count, device = start_ranks(
        settings.get("devices"),
        read_plan(settings.get("plan"), {}),
        settings.get("cluster"),
        settings.get("timeout", 600.0),
    )
    return {**settings, "devices": count}, device


def with_precision(
    settings: Mapping[str, Any],
    asked: str | None,
    argument: str,
    pin: str = "optimize={{'precision': {!r}}}",
) -> dict[str, Any]:
    """The arguments of `optimize` with the precision that an argument of the library asks for.

    pin: how a script pins a precision, with a place for it.

    Raises GraphMisuse (GA407) where `settings` pin another.
    """
    if asked and settings.get("precision") not in (None, asked):
        raise GraphMisuse(
            what=f"{argument}, but {pin.format(settings['precision'])}",
            help_line=f"leave one out, or pin the same:  {pin.format(asked)}",
        )
    return {**settings, "precision": asked} if asked else dict(settings)


def norm_everywhere(norm: Any, model: nn.Module) -> Any:
    """The norm of all gradients on a rank of a pipeline that has none of the trained parameters: as
    those have it that do. A collective there."""
    session = getattr(getattr(model, "graphaccel", None), "session", None)
    if session is None or session.mesh.pipeline == 1:
        return norm
    trained = {session.owner(n) for n, p in model.named_parameters() if p.requires_grad}
    if len(trained) == session.mesh.pipeline:
        return norm
    known = None if isinstance(norm, RemoteTensor) else float(norm)
    every = from_all(known, "the gradients' norm of all ranks")
    return torch.tensor(next(known for known in every if known is not None))


def wait_for_all() -> None:
    """Wait for all ranks, as before one reads what the first wrote."""
    if dist.is_initialized():
        with answered("all ranks"):
            dist.barrier()


def any_rank(said: bool, device: torch.device) -> bool:
    """Whether any rank says so. A collective."""
    if not dist.is_initialized():
        return said
    anyone = torch.tensor(int(said), device=device)
    with answered("what any rank says"):
        dist.all_reduce(anyone, dist.ReduceOp.MAX)
    return bool(anyone)
