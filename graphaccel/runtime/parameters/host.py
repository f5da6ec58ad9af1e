"""Host copies that an optimizer steps where the plan offloads its state to the host.

For each parameter that is stepped (for this rank's shard of it) the host holds a copy, its gradient
and the optimizer's state. Before a step parameters and gradients are copied to the host, after it
parameters are copied back: the device holds no optimizer state or scratch. Parameters are copied to
the host in every step, since a script may have changed them (a checkpoint, weights that are clipped
or averaged).

Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021, §4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphaccel.kernels.host_copy import TO_HOST, wait


class HostCopies:
    """One rank's host copies, allocated at each parameter's first step and reused."""

    def __init__(self, device: torch.device) -> None:
        """device: of parameters and gradients."""
        self._device = device
        self._kept: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def copy_of(self, key: int, local: Tensor, gradient: Tensor) -> nn.Parameter:
        """The host's copy of a parameter with its gradient; valid after `wait`.

        local, gradient: of the same shape, on the device. key: the parameter's identity.
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
        """Wait for the copies to the host."""
        wait(self._device)

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Optimizer state of a parameter with its tensors on the host: loading a checkpoint puts
        them on the device."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                values[name] = TO_HOST(value)
        return values

    def tensors(self) -> Iterator[Tensor]:
        """Parameters and gradients held on the host."""
        for copy_of, gradient in self._kept.values():
            yield copy_of
            yield gradient
