"""What compares the first update of the user's optimizer with that of one device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from graphaccel.compiler.probe_coupling import coupling_of
from graphaccel.proof.first_update import FirstUpdate
from graphaccel.proof.update_samples import Updated
from graphaccel.runtime.parameters.all_gradients import AllGradients
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.sharded_optimizer import is_elementwise
from graphaccel.runtime.parameters.whole_matrices import StateKeys
from graphaccel.runtime.session import Session

Optimizer = torch.optim.Optimizer


def first_update(
    model: nn.Module,
    optimizer: Optimizer,
    session: Session,
    keys: StateKeys | None,
    layouts: Mapping[str, ShardLayout],
    clipping: AllGradients | None,
    *,
    on_host: bool,
) -> FirstUpdate | None:
    """The hooks that do; None where a few parameters tell nothing of the others. keys: what
    `state_keys` says of the optimizer. layouts: of its state, by name. clipping, on_host: as
    `Updated` has them."""
    if not _can_be_compared(optimizer, keys):
        return None
    named = dict(model.named_parameters(remove_duplicate=False))
    return FirstUpdate(
        Updated(
            session.mesh,
            {id(p): name for name, p in model.named_parameters()},
            {id(named[n]): layout for n, layout in layouts.items()},
            is_elementwise(optimizer),
            bool(getattr(optimizer, "graphaccel_elementwise", False)),
            clipping,
            on_host,
        )
    )


def _can_be_compared(optimizer: Optimizer, keys: StateKeys | None) -> bool:
    """Whether some parameters of an optimizer, stepped by themselves, must be changed as all of
    them together change them. keys: what `state_keys` says of it."""
    if keys is not None or is_elementwise(optimizer):
        return True
    coupling = coupling_of(optimizer)
    return not (coupling.dependent or coupling.unknown)
