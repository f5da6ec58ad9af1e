"""Host memory that an optimizer works in, where the plan keeps its state there.

Of each parameter that is stepped (of this rank's shard of it) the host has a copy, its gradient and
the optimizer's state. Before a step parameters and gradients are copied down, after it parameters
up: the device has neither state nor scratch of it. Parameters are copied down again in each step,
since a script may have changed them (a checkpoint, weights that are clipped or averaged).

Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021, §4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.kernels.host_copy import TO_HOST, wait


class HostCopies:
    """One rank's copies, made at the first step of each parameter and kept."""

    def __init__(self, device: torch.device) -> None:
        """device: where parameters and gradients lie."""
        self._device = device
        self._kept: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def twin(self, key: int, local: Tensor, gradient: Tensor) -> nn.Parameter:
        """The host's copy of a parameter with its gradient; to be read after `wait`.

        local, gradient: of one shape, on the device. key: the parameter's identity.
        """
        kept = self._kept.get(key)
        if kept is None or kept[0].shape != local.shape or kept[0].dtype != local.dtype:
            kept = nn.Parameter(TO_HOST(local)), TO_HOST(gradient)
            self._kept[key] = kept
        else:
            kept[0].detach().copy_(local, non_blocking=True)
            kept[1].copy_(gradient, non_blocking=True)
        kept[0].grad = kept[1]
        return kept[0]

    def wait(self) -> None:
        """Until what was copied down is there."""
        wait(self._device)

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Optimizer state of a parameter, its tensors on the host: a checkpoint that was loaded
        left them on the device."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                values[name] = TO_HOST(value)
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and gradients that lie on the host."""
        for twin, gradient in self._kept.values():
            yield twin
            yield gradient
