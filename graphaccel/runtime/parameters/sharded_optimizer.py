"""Runs the user's own optimizer on shards (ZeRO).

While `optimizer.step()` runs, each parameter whose optimizer state is sharded is replaced in the
optimizer's groups by a plain tensor (its twin): this rank's shard of the parameter, with this
rank's shard of the gradient. So the optimizer runs at its own speed, and its state has the shard's
shape. Before and after, groups and state are keyed by the user's parameters. Parameters that are
replicated (ZeRO-1 and 2) are all-gathered from their shards afterwards. Where the plan offloads
optimizer state to the host, every parameter with a gradient has its twin there
(`runtime.parameters.host`).

Rajbhandari et al., ZeRO, 2020, §5.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphaccel.errors import GraphMisuse
from graphaccel.runtime.execution.answers import answered
from graphaccel.runtime.gloo import gather_rows
from graphaccel.runtime.parameters.host import HostCopies
from graphaccel.runtime.parameters.layout import ShardLayout
from graphaccel.runtime.parameters.sharded import ShardTensor
from graphaccel.runtime.parameters.step_hooks import StepHooks, closure_of
from graphaccel.runtime.parameters.strides import Strides

Optimizer = torch.optim.Optimizer

ELEMENTWISE = frozenset(
    "SGD Adam AdamW Adamax NAdam RAdam RMSprop Rprop Adagrad Adadelta ASGD".split()
)
"""Optimizers of torch.optim whose step is elementwise in the parameter."""


def is_elementwise(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer's step on a shard is known to equal that shard of its step on the full
    tensor."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    return optimizer is None or known or bool(getattr(optimizer, "graphaccel_elementwise", False))


class ShardedOptimizer:
    """Hooks around one optimizer that swap parameters for their twins.

    layouts: of optimizer state, by the identity of its parameter; without splits where this rank
    holds it in full. host: where the optimizer works, if not on the device.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hooks: StepHooks,
        bucket_bytes: int,
        host: HostCopies | None = None,
    ) -> None:
        self.layouts: dict[int, ShardLayout] = {}
        self._bucket_bytes, self._host = bucket_bytes, host
        self._stepped: dict[int, nn.Parameter] = {}
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._strides = Strides()
        hooks.add(self._before)
        optimizer.register_step_post_hook(self._after)

    def add_layouts(
        self, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, ShardLayout]
    ) -> None:
        """Add layouts, by name of the parameter."""
        self.layouts |= {id(parameters[n]): layout for n, layout in layouts.items()}

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._restore(optimizer)  # the previous step may have raised
        if self.layouts and closure_of(args, kwargs) is not None:  # may be called several times
            raise GraphMisuse(
                what="optimizer.step(closure) where optimizer state is "
                + ("sharded" if self._host is None else "on the host"),
                help_line="call the closure first, then optimizer.step()",
            )
        views = self._strides.read_by(optimizer)
        for group in optimizer.param_groups:
            group["params"] = [self._local_parameter(p, optimizer, views) for p in group["params"]]
        if self._host is not None:
            self._host.wait()

    def _local_parameter(
        self, parameter: nn.Parameter, optimizer: Optimizer, views: bool
    ) -> nn.Parameter:
        """The shard that the optimizer steps. views: whether it may be a part of each row."""
        layout, gradient = self.layouts.get(id(parameter)), parameter.grad
        on_host = self._host is not None and gradient is not None
        if layout is None or not (layout.splits or on_host):
            return parameter
        local = local_part(parameter, layout)
        own = None if gradient is None else local_part(gradient, layout)
        if not views:  # what it writes is copied back behind the step
            local, own = local.contiguous(), None if own is None else own.contiguous()
        if self._host is not None and own is not None:
            stepped = self._host.copy_of(id(parameter), local, own)
        else:
            stepped = self._on_device(id(parameter), local, parameter.requires_grad)
            stepped.grad = own
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[stepped] = self._host.state(state) if self._host is not None else state
        self._swapped.append((parameter, stepped))
        return stepped

    def _on_device(self, key: int, local: torch.Tensor, trained: bool) -> nn.Parameter:
        """The shard itself as a parameter."""
        stepped = self._stepped.get(key)
        if stepped is None or stepped.data_ptr() != local.data_ptr():
            stepped = self._stepped[key] = nn.Parameter(local, requires_grad=trained)
        return stepped

    def _restore(self, optimizer: Optimizer) -> None:
        """Restore groups and state to the user's parameters."""
        known = {id(stepped): parameter for parameter, stepped in self._swapped}
        for group in optimizer.param_groups:
            group["params"] = [known.get(id(p), p) for p in group["params"]]
        for parameter, stepped in self._swapped:
            if stepped in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(stepped)
        self._swapped = []

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        swapped = self._swapped
        self._restore(optimizer)
        to_gather = []
        for parameter, stepped in swapped:
            layout = self.layouts[id(parameter)]
            if layout.padded and (rest := _rest(parameter, layout)).padded:  # stepped apart
                rest.here(_held(parameter)).copy_(rest.real(stepped.detach()), non_blocking=True)
                self._stepped.pop(id(parameter), None)
            elif stepped.data_ptr() != (local := local_part(parameter, layout)).data_ptr():
                local.copy_(stepped.detach(), non_blocking=True)  # its memory was replaced
            if stepped.grad is not None and _is_full(parameter, layout):
                to_gather.append(parameter)
            stepped.grad = None
        with answered("the parameters that other ranks updated"):
            self._gather(to_gather)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-gather the full tensors of replicated parameters from the shards of all ranks: in
        flat buckets, the next one in flight while one is unpacked."""
        in_flight: tuple[list[Any], torch.Tensor, list[nn.Parameter]] | None = None
        for bucket in self._buckets(parameters):
            layout = self.layouts[id(bucket[0])]
            mesh, axis = layout.mesh, layout.splits[-1].axis
            place = mesh.coordinate(axis)
            pieces = [local_part(p, self.layouts[id(p)]).reshape(-1) for p in bucket]
            rows = pieces[0].new_empty(mesh.size(axis), sum(piece.numel() for piece in pieces))
            torch.cat(pieces, out=rows[place])
            costs = gather_rows(rows, place, mesh.ranks(axis), mesh.group(axis))
            if in_flight is not None:
                self._unpack(*in_flight)
            in_flight = (costs, rows, bucket)
        if in_flight is not None:
            self._unpack(*in_flight)

    def _unpack(self, costs: list[Any], whole: torch.Tensor, bucket: list[nn.Parameter]) -> None:
        for work in costs:
            work.wait()
        offset = 0
        for parameter in bucket:
            layout = self.layouts[id(parameter)]
            split = layout.splits[-1]
            shape = layout.local_shape
            count, own = shape.numel(), layout.mesh.coordinate(split.axis)
            parts = whole[:, offset : offset + count].view(len(whole), *shape)
            offset += count
            if layout.padded and _rest(parameter, layout).padded:
                rows = parts.movedim(0, split.dim).flatten(split.dim, split.dim + 1)
                held = _held(parameter)
                held.copy_(rows.narrow(split.dim, 0, held.shape[split.dim]))
                continue
            target = _held(parameter).unflatten(split.dim, (len(whole), shape[split.dim]))
            target = target.movedim(split.dim, 0)
            for others in (slice(own), slice(own + 1, None)):  # its own is already there
                if len(parts[others]):
                    target[others].copy_(parts[others])

    def _buckets(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        buckets: list[list[nn.Parameter]] = []
        filled, kind = 0, None
        for parameter in parameters:
            size = parameter.numel() * parameter.element_size()
            if not buckets or parameter.dtype != kind or filled + size > self._bucket_bytes:
                buckets.append([])
                filled, kind = 0, parameter.dtype
            buckets[-1].append(parameter)
            filled += size
        return buckets


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter: all of it, or the shard over other axes."""
    return parameter.local if isinstance(parameter, ShardTensor) else parameter.detach()


def local_part(tensor: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """This rank's shard of a tensor that is full, or already sharded over some of the axes."""
    held = _held(tensor)
    if held.shape == layout.local_shape and isinstance(tensor, ShardTensor):
        return held
    return _rest(tensor, layout).own(held)


def _rest(tensor: torch.Tensor, layout: ShardLayout) -> ShardLayout:
    """How this rank's part is sharded further."""
    done = len(tensor.sharding.splits) if isinstance(tensor, ShardTensor) else 0
    return ShardLayout(_held(tensor).shape, layout.splits[done:], layout.mesh) if done else layout


def _is_full(parameter: torch.Tensor, layout: ShardLayout) -> bool:
    return _held(parameter).shape != layout.local_shape
