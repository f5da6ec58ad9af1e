"""Fused step of the user's Adam, AdamW or SGD over all its parameters
(`kernels.multi_tensor.steps`).

While `optimizer.step()` runs, parameter groups that are stepped here are empty, so that torch's own
code has nothing to do for them; before and after, the groups are the user's, and the state is the
one that torch would have created. What is not supported here (amsgrad, maximize, learning rates
that are tensors, ...) is left to torch, and `reasons` says why. So is a step before which a hook
runs that was added after ours: it would see the parameters too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from graphaccel.compat.torch.optimizers import order_step_hooks
from graphaccel.kernels.multi_tensor.steps import AdamRule, Around, MultiTensor, SGDRule
from graphaccel.runtime.host_memory.large_pages import zeros_like_all
from graphaccel.runtime.parameters.all_gradients import AllGradients
from graphaccel.runtime.parameters.step_hooks import calls_closure_first, closure_of

Optimizer = torch.optim.Optimizer
_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_SETTINGS = ("amsgrad", "maximize", "differentiable")


def refusal(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Why the settings of a group leave its step to torch, or None."""
    kind = type(optimizer)
    if kind not in (*_ADAM, torch.optim.SGD):
        return f"{kind.__name__} is neither Adam, AdamW nor SGD of torch.optim"
    for name in _SETTINGS:
        if group.get(name):
            return f"{name}=True"
    numbers = [group["lr"], group["weight_decay"], *group.get("betas", ())]
    if any(isinstance(n, Tensor) for n in numbers):
        return "a learning rate, decay or beta that is a tensor"
    return None


def _unfit(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> str | None:
    """Why some tensors cannot be used beside the parameters that they belong to, or None."""
    for t, p in zip(tensors, like, strict=True):
        if type(t) not in (Tensor, torch.nn.Parameter):
            return f"a parameter or gradient that is a {type(t).__name__}"
        if t.layout != torch.strided or not t.is_contiguous() or t.is_complex():
            return "a tensor that is sparse, complex or not contiguous"
        if t.dtype != p.dtype:
            return "weights, gradients and state of different dtypes"
        if t.shape != p.shape or t.device != p.device:
            return "state of another shape or on another device"
    return None


@dataclass
class _Group:
    """The parameters of a group that have gradients, with gradients and state, in order."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]


class OptimizerStep:
    """Hooks around one optimizer: registered before our other hooks, started after them.

    known: norm and overflow of all gradients, where the step needs them. on_host: the parameters
    that are stepped are on the host (`runtime.parameters.sharded_optimizer`).
    """

    def __init__(
        self, optimizer: Optimizer, known: AllGradients | None = None, *, on_host: bool = False
    ) -> None:
        self.reasons: tuple[str, ...] = ()
        self._known_of_all, self._on_host = known, on_host
        self._optimizer = optimizer
        self._many = MultiTensor()
        self._emptied: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._known: dict[int, list[Tensor]] = {}
        self._after_id = optimizer.register_step_post_hook(self._after).id
        self._before_hook: Any = None

    def start(self) -> None:
        """From now on steps are done here."""
        if self._before_hook is not None:
            self._before_hook.remove()
        self._before_hook = self._optimizer.register_step_pre_hook(self._before)
        # now: while torch runs those behind a step they can not be ordered
        order_step_hooks(self._optimizer, self._before_hook.id, self._after_id)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._restore()  # the previous step may have raised
        closure = closure_of(args, kwargs)
        last = order_step_hooks(optimizer, self._before_hook.id, self._after_id)
        if closure is not None and calls_closure_first(optimizer):
            return  # `in_closure` does it
        if closure is not None or not last:
            self._leave([p for group in optimizer.param_groups for p in group["params"]])
            return
        self._step(optimizer)

    @torch.no_grad()
    def in_closure(self, optimizer: Optimizer, *_: Any) -> None:
        """The step after its closure; hooks of others have run."""
        self._restore()
        self._step(optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        fit: list[_Group] = []
        left: list[Tensor] = []
        reasons = []
        for number, group in enumerate(optimizer.param_groups):
            reason = refusal(optimizer, group)
            result = self._group_of(group) if reason is None else None
            if result is not None:
                reason = self._refused(number, result)
            if result is not None and reason is None:
                fit.append(result)
            elif reason is not None:
                reasons.append(reason)
                left += group["params"]
        around = _on_cpu(self._around()) if self._on_host else self._around()
        if around.found_inf is not None and not _on_device(optimizer, fit):
            # Only the device knows found_inf, and a skipped step would be counted: read it here.
            if self._known_of_all is None or self._known_of_all.overflow is None:
                fit, reasons = [], [*reasons, "step counts on the CPU under torch.amp.GradScaler"]
            elif bool(around.found_inf):
                left += [p for result in fit for p in result.params]
                fit = []
            else:
                around = replace(around, found_inf=None)
        self.reasons = tuple(dict.fromkeys(reasons))
        step = self._sgd if type(optimizer) is torch.optim.SGD else self._adam
        for some in _by_device(fit):
            step(some, around)
        self._leave(left)
        for result in fit:
            self._emptied.append((result.group, result.group["params"]))
            result.group["params"] = []

    def _around(self) -> Around:
        """The scale and overflow flag of torch.amp.GradScaler, and norm and overflow of all
        gradients."""
        optimizer, known = self._optimizer, self._known_of_all
        around = Around(
            getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        )
        if known is None:
            return around
        result = around.found_inf
        if known.overflow is not None:
            result = known.overflow if result is None else torch.maximum(result, known.overflow)
        return replace(around, found_inf=result, max_norm=known.clip_norm, norm=known.norm)

    def _leave(self, params: Sequence[Tensor]) -> None:
        """Prepare gradients for torch's own code."""
        if self._known_of_all is not None and params:
            self._known_of_all.prepare(params)

    def _group_of(self, group: dict[str, Any]) -> _Group:
        pairs = [(p, g) for p in group["params"] if (g := p.grad) is not None]
        params = [p for p, _ in pairs]
        state = self._optimizer.state
        plain = type(self._optimizer) is torch.optim.SGD and not group["momentum"]
        states = [] if plain else [state[p] for p in params]
        return _Group(group, params, [g for _, g in pairs], states)

    def _refused(self, number: int, result: _Group) -> str | None:
        """Why tensors of a group leave it to torch. Weights and state that were checked in the
        previous step are not checked again."""
        names = ("momentum_buffer",) if "momentum" in result.group else ("exp_avg", "exp_avg_sq")
        held = list(result.params)
        for name in names:
            held += [t for s in result.states if (t := s.get(name)) is not None]
        known = self._known.get(number, ())
        if len(held) != len(known) or not all(map(is_, held, known)):
            like = list(result.params)
            for name in names:
                rows = zip(result.params, result.states, strict=False)
                like += [p for p, s in rows if s.get(name) is not None]
            if (reason := _unfit(held, like)) is not None:
                return reason
            self._known[number] = held
        for g, p in zip(result.grads, result.params, strict=True):
            if type(g) is not Tensor or g.dtype != p.dtype or not g.is_contiguous():
                if (reason := _unfit([g], [p])) is not None:
                    return reason
        return None

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()
        if not order_step_hooks(optimizer, self._before_hook.id, self._after_id):
            self.start()  # after hooks that were added meanwhile

    def _restore(self) -> None:
        for group, params in self._emptied:
            group["params"] = params
        self._emptied = []

    def _adam(self, groups: list[_Group], around: Around) -> None:
        kind = type(self._optimizer) is torch.optim.AdamW
        rules: list[AdamRule] = []
        for result in groups:
            group = result.group
            _make_adam_states(result)
            decoupled = group.get("decoupled_weight_decay", kind)
            numbers: Any = (*group["betas"], group["eps"], group["weight_decay"], decoupled)
            rules += [AdamRule(group["lr"], *numbers)] * len(result.params)
        states = [s for result in groups for s in result.states]
        self._many.adam(
            [p for result in groups for p in result.params],
            [g for result in groups for g in result.grads],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s["step"] for s in states],
            rules,
            around,
        )

    def _sgd(self, groups: list[_Group], around: Around) -> None:
        buffers: list[Tensor | None] = []
        first: list[bool] = []
        damped = any(result.group["dampening"] for result in groups)
        if around.found_inf is not None and damped and _any_empty(groups):
            # A skipped first step must not create buffers: dampening depends on whether they exist.
            if bool(around.found_inf):
                return
            around = replace(around, found_inf=None)
        rules: list[SGDRule] = []
        for result in groups:
            group = result.group
            new = [s.get("momentum_buffer") is None for s in result.states]
            empty = [i for i, is_new in enumerate(new) if is_new]
            built = zeros_like_all(
                [result.params[i] for i in empty]
            )  # zeros, as for a skipped step
            for i, buffer in zip(empty, built, strict=True):
                result.states[i]["momentum_buffer"] = buffer
            count = len(result.params)
            buffers += [s["momentum_buffer"] for s in result.states] or [None] * count
            first += new or [False] * count
            numbers = (group["momentum"], group["dampening"], group["nesterov"])
            rules += [SGDRule(group["lr"], *numbers, group["weight_decay"])] * count
        self._many.sgd(
            [p for result in groups for p in result.params],
            [g for result in groups for g in result.grads],
            buffers,
            first,
            rules,
            around,
        )


def _on_cpu(around: Around) -> Around:
    """Its scalars on the CPU, beside parameters on the host."""
    tensors = {name: value for name, value in vars(around).items() if isinstance(value, Tensor)}
    return replace(around, **{name: value.cpu() for name, value in tensors.items()})


def _any_empty(groups: Sequence[_Group]) -> bool:
    return any(s.get("momentum_buffer") is None for result in groups for s in result.states)


def _make_adam_states(result: _Group) -> None:
    """Create the state that torch creates at the first step, for parameters that have none."""
    group = result.group
    new = [i for i, state in enumerate(result.states) if not state]
    params = [result.params[i] for i in new]
    moments = zeros_like_all([*params, *params])
    wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
    dtype = torch.float64 if wide else torch.float32
    for place, i in enumerate(new):
        own = group["capturable"] or group["fused"]
        device = result.params[i].device if own else torch.device("cpu")
        result.states[i].update(
            step=torch.zeros((), dtype=dtype, device=device),
            exp_avg=moments[place],
            exp_avg_sq=moments[len(new) + place],
        )


def _by_device(groups: list[_Group]) -> list[list[_Group]]:
    """Groups with parameters to step, split by device where theirs are on several."""
    results: dict[torch.device, list[_Group]] = {}
    for group in groups:
        devices = dict.fromkeys(p.device for p in group.params)
        for device in devices:
            part = group
            if len(devices) > 1:
                some = [i for i, p in enumerate(group.params) if p.device == device]
                states = [group.states[i] for i in some if group.states]
                params, grads = ([x[i] for i in some] for x in (group.params, group.grads))
                part = _Group(group.group, params, grads, states)
            results.setdefault(device, []).append(part)
    return list(results.values())


def _on_device(optimizer: Optimizer, groups: list[_Group]) -> bool:
    """Whether the step counters are on the device, so that a skipped step is not counted."""
    if type(optimizer) is torch.optim.SGD:
        return True
    return all(
        g.group["capturable"] or g.group["fused"] or all(p.device.type == "cpu" for p in g.params)
        for g in groups
    )
