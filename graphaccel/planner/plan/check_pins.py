"""Checks that pins are compatible with each other, with the device count and with the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import MappingProxyType

from graphaccel.capture.stepgraph import StepGraph
from graphaccel.errors import BadPin, BatchNotDivisible, NoLoss
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.base_plan import PRECISIONS
from graphaccel.planner.plan.limits import Limits
from graphaccel.planner.plan.module_pins import check_stages
from graphaccel.planner.plan.offload import offload_text
from graphaccel.planner.plan.pins import Pins, divisors

# Why zero_bubble (separate weight gradients) does not work with what is offloaded.
_TWICE = MappingProxyType(
    {
        "activations": "reads what is saved a second time, for the gradients of weights, and it "
        "would be copied back twice",
        "parameters": "has the gradients of weights apart, and parameters on the host are copied "
        "up for the forward and the backward alone",
    }
)


def check_together(pins: Pins, devices: int, has_loss: bool) -> None:
    _check_zero(pins, devices)
    _check_sequence(pins)
    _check_sends(pins)
    _check_offloaded_parameters(pins)
    _check_casts(pins, has_loss)
    _check_schedule(pins)
    if pins.stage_of:
        check_stages(dict(pins.stage_of), pins.cuts, pins.pipeline, pins.interleave, pins.schedule)


def _check_zero(pins: Pins, devices: int) -> None:
    zero = pins.zero
    reshard = pins.reshard_after_forward
    sizes = axis_sizes(pins, devices)
    data = sizes["data"]
    if reshard not in (None, "always") and pins.zeros != (3,):
        reason = f"with zero={zero} no parameter is gathered"
        raise BadPin(pin="reshard_after_forward", value=reshard, reason=reason, allowed=("always",))
    if pins.accumulation == "shards" and min(pins.zeros) < 2:
        reason = f"with zero={zero} every device keeps whole gradients"
        raise BadPin(pin="accumulation", value=pins.accumulation, reason=reason, allowed=("whole",))
    if min(pins.zeros) and data == 1:
        raise _without_zero(pins, "with data=1 there is no axis to shard over")
    _check_shard(pins, data)
    for name, splits in pins.placements or ():
        for split in splits:
            if sizes[split.axis] == 1:
                reason = f"{name} is to be sharded over {split.axis}, which has one device"
                raise BadPin(pin="placements", value={name: split}, reason=reason)


def _check_shard(pins: Pins, data: int) -> None:
    """Check the part of the data axis that ZeRO shards over. data: the largest size of that
    axis."""
    if pins.shard_size is None:
        return
    reason = None
    if pins.shard_size == 1:
        reason = "over one device nothing is sharded, which is zero=0"
    elif pins.zero == 0 and not pins.over_data:
        reason = "with zero=0 nothing is sharded"
    elif data % pins.shard_size:
        reason = f"data={data} can not be made of groups of {pins.shard_size}"
    if reason is not None:
        allowed = () if pins.zero == 0 else tuple(str(n) for n in divisors(data) if n > 1)
        raise BadPin(pin="shard_size", value=pins.shard_size, reason=reason, allowed=allowed)


def _without_zero(pins: Pins, reason: str, allowed: Sequence[int] = (0,)) -> BadPin:
    """The error for the pin that asks for ZeRO. allowed: the ZeRO levels that are possible."""
    if pins.zero is not None:
        levels = tuple(map(str, allowed))
        return BadPin(pin="zero", value=pins.zero, reason=reason, allowed=levels)
    if pins.reshard_after_forward not in (None, "always"):
        said = pins.reshard_after_forward
        return BadPin(pin="reshard_after_forward", value=said, reason=reason, allowed=("always",))
    if pins.accumulation == "shards":
        said = pins.accumulation
        return BadPin(pin="accumulation", value=said, reason=reason, allowed=("whole",))
    return BadPin(pin="shard_size", value=pins.shard_size, reason=reason)


def _check_sequence(pins: Pins) -> None:
    if pins.sequence and pins.tensor == 1:
        reason = "with tensor=1 there are no regions of tensor parallelism to shard between"
        raise BadPin(pin="sequence", value=True, reason=reason, allowed=("False",))
    if pins.context_by and pins.context == 1:
        reason = "with context=1 no device shares a sequence with another"
        raise BadPin(pin="context_by", value=pins.context_by, reason=reason)


def _check_sends(pins: Pins) -> None:
    for axis in ("tensor", "pipeline"):
        if pins.scatter_sends and getattr(pins, axis) == 1:
            reason = f"with {axis}=1 there is nothing to send in parts"
            raise BadPin(pin="scatter_sends", value=True, reason=reason, allowed=("False",))


def _check_casts(pins: Pins, has_loss: bool) -> None:
    if not pins.cast_once:
        return
    reason = None
    if pins.precision != "auto" and PRECISIONS[pins.precision or "fp32"].compute == "float32":
        reason = f"with precision={pins.precision or 'fp32'} no parameter is cast"
    elif pins.zero == 3:
        reason = (
            "with zero=3 parameters are gathered; reshard_after_forward='once_per_step' "
            "does it once a step"
        )
    elif pins.zeros == (3,):
        reason = (
            f"reshard_after_forward={pins.reshard_after_forward!r} is of zero=3, which "
            "gathers parameters that are held in shards; cast_once holds casts of those that "
            "are whole, under zero=0, 1 or 2"
        )
    elif not has_loss:
        reason = "with a loss outside of the graph there is one microbatch"
    if reason is not None:
        raise BadPin(pin="cast_once", value=True, reason=reason, allowed=("False",))


def _check_offloaded_parameters(pins: Pins) -> None:
    """Check the pins that would keep full parameters on the device while parameters are
    offloaded."""
    if "parameters" not in (pins.offload or ()):
        return
    whole = pins.zero == 0 and (pins.data or 1) > 1
    if whole or pins.zero in (1, 2):
        reason = "over data, parameters on the host rest in shards, which is zero=3"
        raise BadPin(pin="zero", value=pins.zero, reason=reason, allowed=("3",))
    if pins.reshard_after_forward not in (None, "always"):
        raise BadPin(
            pin="reshard_after_forward",
            value=pins.reshard_after_forward,
            reason="parameters on the host are copied up again for the backward: no device holds "
            "them between",
            allowed=("always",),
        )
    if pins.cast_once:
        reason = "parameters on the host are cast when they were copied up, in each microbatch"
        raise BadPin(pin="cast_once", value=True, reason=reason, allowed=("False",))


def axis_sizes(pins: Pins, devices: int) -> dict[str, int]:
    """The sizes of the mesh axes; for data the largest possible size."""
    data = pins.data or devices // (pins.model_parallel_size * (pins.pipeline or 1))
    inner = {axis: getattr(pins, axis) or 1 for axis in ("expert", "context", "tensor")}
    return {"data": data, **inner}


def check_mesh(pins: Pins, devices: int) -> None:
    """Check that the axis sizes multiply to `devices`; the search fills in the axes that are not
    pinned."""
    for name in AXES:
        value = getattr(pins, name)
        if value is not None and devices % value:
            allowed = tuple(str(n) for n in divisors(devices))
            reason = f"{devices} devices can not be shared evenly by {value}"
            raise BadPin(pin=name, value=value, reason=reason, allowed=allowed)
    said = {axis: getattr(pins, axis) or 1 for axis in ("data", "expert", "context", "tensor")}
    said = {axis: size for axis, size in said.items() if size > 1 or axis == "data"}
    said["pipeline"] = pins.pipeline or 1
    product = prod(said.values())
    whole = pins.data and pins.pipeline
    if (whole and product != devices) or devices % product:
        rest = product // said["data"]
        name = "data" if pins.data else next(a for a in reversed(AXES) if said.get(a, 1) > 1)
        text = " x ".join(f"{a} {n}" for a, n in said.items() if getattr(pins, a) is not None)
        raise BadPin(
            pin=name,
            value=said[name],
            reason=f"{text} is {product}, not {devices} devices",
            allowed=(str(devices // rest),) if name == "data" and devices % rest == 0 else (),
        )
    if pins.cuts is not None:
        stages = len(pins.cuts) + 1
        ranks = pins.pipeline or (
            devices // (pins.data * pins.model_parallel_size) if pins.data else None
        )
        if pins.interleave and ranks and ranks * pins.interleave != stages:
            reason = f"{stages - 1} cuts make {stages} stages, not {ranks * pins.interleave}"
            raise BadPin(pin="cuts", value=pins.cuts, reason=reason)
        if ranks and stages % ranks:
            reason = f"{stages - 1} cuts make {stages} stages, for {ranks} pipeline ranks"
            raise BadPin(pin="cuts", value=pins.cuts, reason=reason)


def _check_schedule(pins: Pins) -> None:
    several = pins.interleave is not None and pins.interleave > 1
    if several and pins.schedule not in (None, "interleaved"):
        raise BadPin(
            pin="schedule",
            value=pins.schedule,
            reason=f"interleave={pins.interleave} needs a schedule for several stages a rank",
            allowed=("interleaved",),
        )
    if pins.schedule == "zero_bubble":
        _check_weights_apart(pins)
    if several and pins.pipeline == 1:
        raise BadPin(
            pin="interleave",
            value=pins.interleave,
            reason="without a pipeline there is nothing to interleave",
            allowed=("1",),
        )


def _check_weights_apart(pins: Pins) -> None:
    if min(pins.zeros) > 1:
        raise _without_zero(
            pins,
            "schedule='zero_bubble' adds gradients up after the backward, and ZeRO 2 and 3 reduce "
            "them inside it",
            (0, 1),
        )
    on_host = pins.offload or ()
    for what, reason in _TWICE.items():
        if what in on_host:
            said = f"schedule='zero_bubble' {reason}"
            allowed = ("none", "optimizer")
            raise BadPin(pin="offload", value=offload_text(on_host), reason=said, allowed=allowed)
    if pins.ort not in (None, "auto", "off"):
        raise BadPin(
            pin="ort",
            value=pins.ort,
            reason="schedule='zero_bubble' takes the weight gradients out of the backward, and a "
            "region would hold both",
            allowed=("auto", "off"),
        )


def check_loss(pins: Pins, step: StepGraph) -> None:
    if step.has_loss:
        return
    for name in ("pipeline", "interleave", "microbatches"):
        if (getattr(pins, name) or 1) > 1:
            raise NoLoss(asked=f"{name}={getattr(pins, name)}")
    if any(stage for _, stage in pins.stage_of or ()):
        raise NoLoss(asked=f"stage_of={dict(pins.stage_of or ())}")
    if pins.cuts:
        raise NoLoss(asked=f"cuts={pins.cuts}")
    if pins.precision == "fp16":
        raise BadPin(
            pin="precision",
            value="fp16",
            reason="fp16 scales the loss before it is differentiated, and skips steps "
            "that overflow; the loss is outside of the graph, and loss_fn= puts it inside",
            allowed=("bf16", "fp32"),
        )
    if pins.outputs == "loss":
        raise NoLoss(asked="outputs='loss'")
    for name in ("tensor", "context", "expert", "zero"):
        whole = 0 if name == "zero" else 1
        if (getattr(pins, name) or whole) > whole:
            raise BadPin(
                pin=name,
                value=getattr(pins, name),
                reason="with a loss outside of the graph only the batch is split; loss_fn= puts "
                "it inside",
                allowed=(str(whole),),
            )
    if min(pins.zeros) > 0:
        reason = "with a loss outside of the graph nothing is in shards; loss_fn= puts it inside"
        raise _without_zero(pins, reason)


def check_batch(pins: Pins, batch: int, limits: Limits) -> None:
    for axis, limit in (("data", limits.data), ("microbatches", limits.microbatches)):
        if limit is not None and (getattr(pins, axis) or 1) > 1:
            name = "microbatch" if axis == "microbatches" else axis
            raise limit.refused(name)
    head, known = limits.head, pins.schedule in (None, "gpipe")
    if head is not None and (pins.microbatches or 1) > 1:
        if not known or (pins.interleave or 1) > 1:
            raise head.refused_schedule(pins.schedule or "interleaved")
    data, microbatches = pins.data or 1, pins.microbatches or 1
    if batch % (data * microbatches):
        allowed = divisors(batch // data) if batch % data == 0 else ()
        raise BatchNotDivisible(batch=batch, microbatches=microbatches, data=data, allowed=allowed)
