"""The plan from which a search starts, and the precisions to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphaccel.kernels.registry import enabled
from graphaccel.planner.plan.axis_order import AXES
from graphaccel.planner.plan.pins import Pins
from graphaccel.planner.plan.plan import Plan, Precision

PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(),
    "bf16": Precision(compute="bfloat16"),
    "bf16-params": Precision(compute="bfloat16", stream="bfloat16"),
    "fp16": Precision(compute="float16", scaled=True),
    "tf32": Precision(matmul="tfloat32"),
    "fp8": Precision(compute="bfloat16", stream="bfloat16", matmul="float8_e4m3fn"),
}


COMPILERS = ("off", "inductor")
"""What runs the graphs of stages (`Plan.compile`): FX code, or Inductor's."""


def compile_for(pinned: str | None, device_type: str) -> str:
    """What runs the graphs of stages ("off" or "inductor") for a pin: "auto", which is what None
    means, is Inductor on GPUs. On a CPU it needs a C++ compiler, and is not faster on every model
    (docs/compile.md)."""
    if pinned in (None, "auto"):
        return "inductor" if device_type == "cuda" else "off"
    return pinned


def makes_kernels(compile: str | None, device_type: str) -> bool:
    """Whether Inductor makes the kernels of a GPU, whose time is predicted
    (`planner.profile.compiled_traffic`). compile: the pin, or a plan's."""
    return device_type == "cuda" and compile_for(compile, device_type) == "inductor"


def fusions_for(
    pinned: str | Sequence[str] | None, compile: str | None, device_type: str
) -> tuple[str, ...]:
    """Names of the fused ops that may be placed: on GPUs those of "auto" unless pinned, on CPUs
    none. compile: the pin.

    Raises: UnknownFusion (GA703), BadFusionPackage (GA704).
    """
    compiled = compile_for(compile, device_type) != "off"
    if pinned is None:
        pinned = "auto" if device_type == "cuda" else "off"
    return enabled(pinned, device_type, compiled=compiled)


def base_plan(
    pins: Pins,
    devices: int,
    batch: int,
    graph: str,
    cluster: str,
    outputs: str,
    device_type: str = "cpu",
) -> Plan:
    """The plan from which the search starts: every pinned decision that does not depend on the
    mesh. device_type: on a GPU, compiled code is bound by the bytes that it moves, and a min-cut
    decides which of them are saved."""
    return Plan(
        devices=devices,
        precision=PRECISIONS[pins.precision or "fp32"],
        bucket_bytes=pins.bucket_bytes or Plan.bucket_bytes,
        loss_chunk=pins.loss_chunk or 0,
        outputs=outputs,
        tensor=pins.tensor or 1,
        context=pins.context or 1,
        expert=pins.expert or 1,
        order=pins.order or AXES,
        zero=min(pins.zeros),
        reshard_after_forward=pins.reshard_after_forward or "always",
        cast_once=bool(pins.cast_once),
        accumulation=pins.accumulation or "whole",
        placements=pins.placements or (),
        sequence=pins.sequence is not False,
        context_by=pins.context_by or "",
        scatter_sends=bool(pins.scatter_sends),
        ort="auto" if pins.ort is None else pins.ort,
        fallback=pins.fallback or "error",
        compile=compile_for(pins.compile, device_type),
        cuda_graphs=bool(pins.cuda_graphs),
        min_cut=(
            makes_kernels(pins.compile, device_type) if pins.min_cut is None else pins.min_cut
        ),
        offload=pins.on_host,
        batch=batch,
        pinned=pins.names,
        graph=graph,
        cluster=cluster,
    )
