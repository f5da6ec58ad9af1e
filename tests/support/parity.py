"""Train a zoo model on one process in eager mode and under a plan, and compare the two.

The single-process eager model in float64 is the reference for everything. Gradients are known by
their parameter's name; a tied weight has several names and one gradient.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from graphaccel.runtime.meter import PeakMeter
from graphaccel.runtime.parameters.sharded import ShardTensor
from tests.support.captures import observed_once, packed_once, read_captures, write_captures
from tests.support.casts import lift_captured_casts
from tests.support.inside import captures_in
from tests.support.zoo import ALL, Batch, LossFn, call, double, lift_loss_cast, loss_of

LEARNING_RATE = 1e-3
# A gradient smaller than this part of the model's largest is rounding of a mathematical zero:
# attention's key bias, whose every contribution cancels in the softmax.
ZERO = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True)
class Reference:
    """What eager mode computes on one process.

    `grads`: of the first step, by every name of each parameter that gets one; `first_name` maps
    each of these to the first name of the same parameter. `losses`: before each optimizer step;
    `state`: the state dict after the last one.
    """

    dtype: str
    loss: float
    grads: Mapping[str, Tensor]
    first_name: Mapping[str, str]
    losses: tuple[float, ...]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """Largest relative errors: max|got - reference| / max|reference|, over the ranks.

    `grads` is by parameter name. `zero` names the gradients that are mathematically zero: their
    error is absolute, in units of ZERO x the model's largest gradient, and at most 1 when right.
    """

    loss: float
    losses: float
    grads: Mapping[str, float]
    zero: Mapping[str, float]
    state: Mapping[str, float]
    buffers: frozenset[str] = frozenset()

    @property
    def worst_grad(self) -> tuple[str, float]:
        """Name and error of the gradient that is furthest off; NaN is further than any number."""
        return max(self.grads.items(), key=lambda item: (math.isnan(item[1]), item[1]))

    def check(self, loss: float, grads: float | None = None) -> None:
        """Assert that loss curve, buffers (and gradients) are within these relative errors."""
        assert self.loss <= loss, f"loss off by {self.loss:.1e}"
        assert self.losses <= loss, f"loss curve off by {self.losses:.1e}"
        wrong = {name: e for name in self.buffers if not (e := self.state[name]) <= loss}
        assert not wrong, f"buffers off by {wrong}"
        if grads is not None:
            name, error = self.worst_grad
            assert error <= grads, f"gradient of {name} off by {error:.1e}"
            wrong = {name: error for name, error in self.zero.items() if not error <= 1}
            assert not wrong, f"gradients that should be zero, in units of the floor: {wrong}"


def reference(name: str, dtype: str = "float64", steps: int = 1, lift: bool = True) -> Reference:
    """`steps` (at least 1) eager AdamW steps of the zoo model `name` on one process.

    `dtype` is "float32" or "float64"; `lift` makes a float64 model compute its loss in float64 too.
    """
    with casts(dtype, lift):
        model, batch, loss_fn = build(name, dtype)
        names = _first_names(model)
        losses, grads = train(model, make_optimizer(model), batch, loss_fn, steps)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Reference(dtype, losses[0], grads, names, tuple(losses), state)


def run_plan(
    name: str, dtype: str, pins: Mapping[str, Any], steps: int = 1, lift: bool = True
) -> dict[str, Any]:
    """The same under `graphaccel.optimize(**pins)`, in a worker of the pool; this rank's results.

    Returns loss, grads (those held here, by name), losses, state (full, on rank 0), and for one
    more step without the optimizer peak_predicted and peak_measured (bytes of tensor storage on the
    device), host_predicted and host_measured (bytes that the plan keeps on the host).
    """
    import graphaccel

    others = [tensor.untyped_storage() for tensor in tensors_alive()]
    # The caller compares with eager: tests/proof has the proof, which would run eager code here.
    pins = {"check": "off", **pins}
    planned = captured_casts if pins["check"] == "off" else casts
    with casts(dtype, lift):  # models compute constants, too
        model, batch, loss_fn = build(name, dtype)
    with planned(dtype, lift), observed_once(name), packed_once():
        model, optimizer = graphaccel.optimize(
            model, make_optimizer(model), loss_fn=loss_fn, **pins
        )
        # Captures depend on the model and the batch alone: one serves all plans in this worker.
        captures = captures_in(model)
        captures.steps = zoo_captures(name, dtype, lift)
        losses, grads = train(model, optimizer, batch, loss_fn, steps)
        if dist.get_rank() == 0:
            write_captures(f"{name} {dtype} {lift}", captures.steps)
        state = graphaccel.full_state_dict(model)
        copies = {key: value.clone() for key, value in state.items()}
        del state
        rank = torch.distributed.get_rank()
        result = {
            "loss": losses[0],
            "losses": tuple(losses),
            "grads": grads,
            "state": copies if rank == 0 else {},
        }
        others += [value.untyped_storage() for value in (*copies.values(), *grads.values())]
        result["peak_predicted"] = model.graphaccel.predicted_pass_bytes
        result["host_predicted"] = model.graphaccel.predicted_host_bytes
        predicted = result["peak_predicted"], result["host_predicted"]
        peaks, result["steps_measured"] = least_peaks(model, batch, loss_fn, others, predicted)
        result["peak_measured"], result["host_measured"] = peaks
    return result


@functools.cache
def zoo_captures(name: str, dtype: str, lift: bool = True) -> dict[Any, Any]:
    """The captures of one zoo model that this worker has made or found so far."""
    found: dict[Any, Any] = {}
    read_captures(f"{name} {dtype} {lift}", found)
    return found


def make_optimizer(model: nn.Module) -> Optimizer:
    """AdamW in two parameter groups: no weight decay on biases and norms, as is usual."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=LEARNING_RATE)


def build(name: str, dtype: str) -> tuple[nn.Module, Batch, LossFn | None]:
    """The zoo model `name` and its batch in "float32" or "float64"."""
    model, batch, loss_fn = ALL[name].build()
    if dtype == "float64":
        return *double(model, batch), loss_fn
    if dtype != "float32":
        raise ValueError(f"dtype must be float32 or float64, not {dtype}")
    return model, batch, loss_fn


def train(
    model: nn.Module, optimizer: Optimizer, batch: Batch, loss_fn: LossFn | None, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The user's loop, on one batch: the losses, and copies of the first step's gradients."""
    losses: list[float] = []
    grads: dict[str, Tensor] = {}
    for step in range(steps):
        loss = loss_of(call(model, batch), batch, loss_fn)
        loss.backward()
        if step == 0:
            grads = _grads(model)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def compare(expected: Reference, got: Sequence[Mapping[str, Any]]) -> Comparison:
    """The results of all ranks against the reference.

    Raises AssertionError if a parameter that has a gradient in the reference has none on any rank,
    if a rank holds a gradient that the reference has not, or if a shape differs.
    """
    held = {expected.first_name.get(name, name) for result in got for name in result["grads"]}
    wanted = {expected.first_name[name] for name in expected.grads}
    assert wanted <= held, f"no rank has the gradient of {sorted(wanted - held)}"
    assert held <= wanted, f"gradients that eager does not have: {sorted(held - wanted)}"

    floor = ZERO[expected.dtype] * max(_size(grad) for grad in expected.grads.values())
    grads: dict[str, float] = {}
    zero: dict[str, float] = {}
    for result in got:
        for name, grad in result["grads"].items():
            true = expected.grads[name]
            small = _size(true) <= floor
            errors, scale = (zero, floor) if small else (grads, _size(true))
            errors[name] = _larger(errors.get(name, 0.0), _distance(grad, true, name) / scale)

    curves = [result["losses"] for result in got]
    assert all(len(curve) == len(expected.losses) for curve in curves), "curves of other lengths"
    return Comparison(
        loss=_worst([(result["loss"], expected.loss) for result in got]),
        losses=_worst([pair for c in curves for pair in zip(c, expected.losses, strict=True)]),
        grads=grads,
        zero=zero,
        state=_state_errors(expected.state, got[0]["state"]),
        buffers=frozenset(expected.state) - frozenset(expected.first_name),
    )


def _state_errors(true: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    assert set(got) == set(true), f"state dicts differ in {sorted(set(got) ^ set(true))}"
    return {
        name: _distance(got[name], value, name) / (_size(value) or 1.0)
        for name, value in true.items()
    }


def casts(dtype: str, lift: bool) -> contextlib.AbstractContextManager[None]:
    return lift_loss_cast() if lift and dtype == "float64" else contextlib.nullcontext()


def captured_casts(dtype: str, lift: bool) -> contextlib.AbstractContextManager[None]:
    return lift_captured_casts() if lift and dtype == "float64" else contextlib.nullcontext()


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[Tensor, str] = {}
    everything = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(parameter, name) for name, parameter in everything}


def _grads(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients on this rank, by every name; parameters of other stages have none."""
    return {
        name: _whole(parameter.grad.detach()).clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if type(parameter).__name__ != "RemoteTensor" and parameter.grad is not None
    }


def _whole(value: Tensor) -> Tensor:
    return value.whole() if isinstance(value, ShardTensor) else value


def _size(value: Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def _distance(got: Tensor, true: Tensor, name: str) -> float:
    assert got.shape == true.shape, f"{name}: {tuple(got.shape)} instead of {tuple(true.shape)}"
    assert got.dtype == true.dtype, f"{name}: {got.dtype} instead of {true.dtype}"
    return _size(got.double() - true.double())


def _worst(pairs: Sequence[tuple[float, float]]) -> float:
    error = 0.0
    for got, true in pairs:
        error = _larger(error, abs(got - true) / abs(true))
    return error


def _larger(a: float, b: float) -> float:
    """The maximum, NaN if either is: Python's max would lose it."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def tensors_alive() -> list[Tensor]:
    """All tensors with memory of their own that Python knows of in this process."""
    gc.collect()
    kinds = {Tensor, nn.Parameter}
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


def stored(tensors: Any) -> int:
    """Bytes of the storages that tensors lie in here, each once."""
    storages = {}
    for tensor in tensors:
        local = tensor.local if isinstance(tensor, ShardTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def peak_of_a_step(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, others: list[torch.UntypedStorage]
) -> int:
    """Peak bytes alive in one forward and backward on this rank, all that is alive before included.

    Everything the process holds counts (parameters, optimizer state, buffers of the runtime, the
    batch), except the storages in `others`, which the test itself keeps.
    """
    return peaks_of_a_step(model, batch, loss_fn, others)[0]


def least_peaks(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFn | None,
    others: list[torch.UntypedStorage],
    predicted: tuple[int, int] = (0, 0),
) -> tuple[tuple[int, int], int]:
    """As `peaks_of_a_step`, of three steps the least, and how many there were: one, where no rank
    has more than is predicted. A thread of gloo that a busy machine has stopped may let go of what
    it sent late. Leaves gradients."""
    found: list[tuple[int, int]] = []
    above = torch.ones(1)
    while above.item() and len(found) < 3:
        model.zero_grad()
        found.append(peaks_of_a_step(model, batch, loss_fn, others))
        pairs = zip(found[-1], predicted, strict=True)
        above = torch.tensor([float(any(peak > 1.003 * said for peak, said in pairs))])
        if dist.is_initialized():  # they step together
            dist.all_reduce(above, dist.ReduceOp.MAX)
    peaks, hosts = zip(*found, strict=True)
    return (min(peaks), min(hosts)), len(found)


def peaks_of_a_step(
    model: nn.Module, batch: Batch, loss_fn: LossFn | None, others: list[torch.UntypedStorage]
) -> tuple[int, int]:
    """As `peak_of_a_step`, on the device; and what the plan keeps on the host."""
    ignored = {id(storage) for storage in others}
    with PeakMeter(
        resident=[t for t in tensors_alive() if id(t.untyped_storage()) not in ignored],
        host=model.graphaccel.host_tensors() if hasattr(model, "graphaccel") else (),
    ) as meter:
        loss_of(call(model, batch), batch, loss_fn).backward()
    return meter.peak, meter.host_peak
