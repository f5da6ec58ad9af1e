"""What an executor holds for a run, what it holds during one step, and a step's results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphaccel.runtime.execution.parts import Parts
from graphaccel.runtime.parameters.layout import ShardLayout


@dataclass
class StepResult:
    """The results of one step on this rank.

    loss: scalar, the same on every rank. gradients: by parameter name, of this rank's stages.
    outputs: by leaf of what the model returned, for the whole batch, on every rank. overflow: of a
    step in fp16, nonzero if gradients of some rank overflowed. layouts: of the gradients that are
    sharded. inputs: gradients by batch leaf, where the script computes the loss.
    """

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    outputs: dict[int, torch.Tensor]
    overflow: torch.Tensor | None = None
    layouts: Mapping[str, ShardLayout] = field(default_factory=dict)
    inputs: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a rank holds for the whole run, by name. parameters: as stored: shards of those that are
    sharded between uses. constants: lifted tensors of the model's code. shards: flat buffers of
    parameter groups, by the first name of each. gradients: layouts of those that are kept in
    shards."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    shards: Mapping[str, torch.Tensor] = field(default_factory=dict)
    gradients: Mapping[str, ShardLayout] = field(default_factory=dict)


@dataclass
class StepState:
    """The state of one step on one rank. awaited: in words, what other ranks have to give, beside
    the action, and the parameters or buffers that it is about."""

    leaves: list[Any]
    prologue: dict[str, torch.Tensor]
    scale: torch.Tensor | None = None
    accumulators: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    buckets: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    saved: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    held: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    parts: Parts = field(default_factory=lambda: Parts(1))
    headed: dict[str, torch.Tensor] = field(default_factory=dict)
    carried: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    inbox: dict[tuple[int, int, str], dict[str, torch.Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    outbox: dict[tuple[int, int, int, str], dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    loss: torch.Tensor | None = None
    loss_reduction: Any = None
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    tangents: dict[int, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    seed: int | None = None
    awaited: tuple[str, tuple[str, ...]] = ("", ())
