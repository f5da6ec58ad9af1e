"""Types of keyword arguments that are pins. Written by `python docs/pins.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from graphaccel.ir.program import Sharded


class PinArguments(TypedDict, total=False):
    """What may be pinned; None counts as left out. docs/pins.md explains each."""

    data: int | None
    pipeline: int | None
    tensor: int | None
    context: int | None
    expert: int | None
    interleave: int | None
    microbatches: int | None
    order: Sequence[str] | None
    zero: Literal[0, 1, 2, 3] | None
    shard_size: int | None
    sequence: bool | None
    scatter_sends: bool | None
    reshard_after_forward: Literal["always", "once_per_step", "never"] | None
    cast_once: bool | None
    context_by: Literal["heads", "sequence"] | None
    accumulation: Literal["whole", "shards"] | None
    recompute: str | Sequence[str] | None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] | None
    cuts: Sequence[str] | None
    bucket_bytes: int | None
    precision: Literal["fp32", "bf16", "bf16-params", "fp16", "tf32", "fp8", "auto"] | None
    compile: Literal["off", "auto", "inductor"] | None
    min_cut: bool | None
    cuda_graphs: bool | None
    fusions: str | Sequence[str] | None
    loss_chunk: int | None
    offload: (
        Literal[
            "none",
            "optimizer",
            "activations",
            "optimizer+activations",
            "optimizer+parameters",
            "optimizer+parameters+activations",
        ]
        | None
    )
    vocab: Literal["data", "tensor"] | None
    stage_of: Mapping[str, int] | None
    placements: Mapping[str, Sharded | tuple[Sharded, ...]] | None
    outputs: Literal["loss", "all"] | None
    ort: str | Sequence[str] | None
    fallback: Literal["error", "fx"] | None
