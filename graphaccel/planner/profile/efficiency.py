"""Seconds of a node's work on a device: a roofline with the efficiency that kernels reach.

    max(FLOPs / (peak x efficiency), bytes / bandwidth) + the cost of starting it

(Williams, Waterman, Patterson, CACM 2009.) The efficiency is a number of the device
(`planner.cluster.cluster.Device`: measured on large shapes) times the share that the shape leaves
of it:

* A matmul [m, k] x [k, n] is computed in tiles, one on a processor at a time. The parts of tiles
  beyond the edge are wasted, and so are processors without a tile in the last round (wave
  quantization); half of that, since real kernels split the last round. Each tile fills its pipeline
  of loads once: k / (k + 128). The library picks the best of its tiles, small ones being slower.
  Against 183 matmuls measured on A100 (SimuMax, configs/system, Apache 2.0): 4.1 % mean error, a
  third too fast where one round is hardly filled; against 514 on B200: 10.3 %.
  Where the number of processors is not known, tiles of 128 x 128 and k / (k + 64) replace all of
  that.
  Tensor cores are fed by copies of 4, 8 or 16 bytes (PTX ISA, `cp.async`). With 2-byte numbers in
  rows of an odd length not even those of 4 are aligned, and 0.45 of the rate is left, as the times
  of GPT's 50257 words show beside those of two even halves (VIA-Research/vTrain, one node, A100).
  From Hopper on they are fed by a unit that takes rows of multiples of 16 bytes only (PTX ISA,
  `cp.async.bulk.tensor`); other rows use the kernels of Ampere, at its rate per processor: 232
  TFLOP/s for BERT's 30522 words, 121 for GPT-2's 50257, of about 745 (`benchmarks.gpu`, H200).
* Fused attention computes one block of 128 queries on a processor; t of them leave processors idle,
  t / (t + r x processors), and a short sequence is mostly start and diagonal, s / (s + 1024). With
  r = 1.5 forward and 0.6 backward within a tenth of the same tables on A100 from 8 heads on.

A matmul in 8 bits reads inputs that are cast for it (NVIDIA Transformer Engine, "FP8 primer"): of
the three matmuls of a linear layer, its input and the gradient of its output, each written twice,
as it is and transposed, by the kernel that computes it, once for all matmuls that read it. Weights
are cast once a step. In 4 bits each 16 numbers have a scale of 8 bits, and the tensor has one by
its largest number: it is read to find that, again to cast it, and once more for the transposed
copy, to which a random Hadamard transform is applied first ("Pretraining Large Language Models with
NVFP4", arXiv 2509.25149, 2025, section 4 and appendix B).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from graphaccel.planner.cluster.cluster import Device, OpTime
from graphaccel.planner.plan.plan import Precision

# Tiles of CUTLASS and cuBLAS, and the share of the largest tiles' rate that smaller ones reach.
_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.9),
    (128, 64, 0.65),
    (64, 128, 0.65),
    (64, 64, 0.5),
)
_ODD = 0.45  # of the rate, where rows of 16-bit numbers have an odd length
_ALIGNED = 16  # bytes
_AMPERE = 312e12 / 108  # FLOP/s of a processor in 16 bits (NVIDIA A100 Tensor Core GPU, 2020)
_SHARED = 0.5  # share that is lost of the last round's idle processors
_INNER = 128
_GAP = 2e-6
_QUERIES = 128
_DIAGONAL = 1024
_ROUNDS = {"attention": 1.5, "attention backward": 0.6}
_EIGHT_BITS = "8-bit matmuls of "  # with a dtype: a rate of a device from `computing`
_FOUR_BITS = "4-bit matmuls of "
# Bytes written, and in 4 bits read, for each number that is cast.
_CASTS = {_EIGHT_BITS: 1 + 1, _FOUR_BITS: 3 * 2 + 2 * (1 / 2 + 1 / 16)}


@dataclass(frozen=True)
class Work:
    """The work of one node for a device.

    op: ATen name without overload. kind: "product" (a matmul), "attention", "attention backward",
    "dense" (a convolution), "chunks" (of `parts`), or "" for what only moves bytes. flops: those
    that are actually computed. dtype: torch dtype name it computes in. rows, columns, inner, count:
    of a matmul, or of `count` of them; for attention rows is the queries and count the heads.
    calls: kernels that are started. aligned: bytes, up to 16, of which the rows of every matrix of
    a matmul are multiples in memory, where these are of 16 bits. parts: the work that it does one
    after another, `times` over, where it is no single kernel; flops and bytes are those of all.
    cast: the share of the cast of a matmul's left operand that counts for this matmul, where
    matmuls are in fewer bits.
    """

    kind: str = ""
    flops: int = 0
    bytes: int = 0
    dtype: str = "float32"
    rows: int = 0
    columns: int = 0
    inner: int = 0
    count: int = 1
    calls: int = 1
    op: str = ""
    aligned: int = _ALIGNED
    parts: tuple[Work, ...] = ()
    times: int = 1
    cast: float = 1.0

    @property
    def name(self) -> str:
        """The name that `OpTime` uses for it."""
        return "product" if self.kind == "product" else self.op


NOTHING = Work(calls=0)


def peak_flops(device: Device, dtype: str) -> float:
    """FLOP/s at the given torch dtype name; a dtype without a fast path runs as float32."""
    return device.peak_flops.get(dtype, device.peak_flops["float32"])


def computing(device: Device, precision: Precision) -> Device:
    """The device with the rates of a precision that rounds the inputs of matmuls."""
    if not precision.matmul:
        return device
    rate = peak_flops(device, precision.matmul)
    if precision.matmul == "tfloat32":  # convolutions and attention as well
        return replace(device, peak_flops={**device.peak_flops, "float32": rate})
    bits = _FOUR_BITS if precision.matmul.startswith("float4") else _EIGHT_BITS
    return replace(device, peak_flops={**device.peak_flops, bits + precision.compute: rate})


def seconds_of(work: Work, device: Device) -> float:
    """Seconds on `device`, without the cost of starting it."""
    if work.parts:
        return work.times * sum(seconds_of(part, device) for part in work.parts)
    known = measured_seconds(work, device)
    if known is not None:
        return max(0.0, known - work.calls * gap_seconds(device))
    seconds = work.bytes / device.memory_bandwidth
    if not work.flops:
        return seconds
    peak, cast = peak_flops(device, work.dtype), 0.0
    for bits, moved in _CASTS.items() if work.kind == "product" else ():
        if low := device.peak_flops.get(bits + work.dtype):
            left = work.cast * work.count * work.rows * work.inner
            reached = (device.product_8_bits or device.product) / device.product
            peak, cast = reached * low, moved * left / device.memory_bandwidth
    return max(seconds, work.flops / (peak * efficiency(work, device))) + cast


def measured_seconds(work: Work, device: Device) -> float | None:
    """Seconds of a call from the most similar measured call on the device, scaled by their work.
    None where the op was not measured there."""
    measured = _measured(device).get((work.name, work.dtype), ())
    if not measured:
        return None
    shape = _shape(work)

    def apart(other: OpTime) -> float:
        pairs = zip(shape, _shape(other), strict=True)
        return sum(abs(math.log((a + 1) / (b + 1))) for a, b in pairs)

    near = min(measured, key=apart)
    more = work.flops / near.flops if near.flops else work.bytes / max(near.bytes, 1)
    floor = min(near.seconds, gap_seconds(device))
    return floor + (near.seconds - floor) * more


def _shape(work: Work | OpTime) -> tuple[int, ...]:
    if work.flops and work.rows:
        return work.rows, work.columns, work.inner, work.count
    return (work.flops or work.bytes,)


@cache
def _measured(device: Device) -> dict[tuple[str, str], tuple[OpTime, ...]]:
    results: dict[tuple[str, str], tuple[OpTime, ...]] = {}
    for row in device.measured:
        results[row.op, row.dtype] = (*results.get((row.op, row.dtype), ()), row)
    return results


def gap_seconds(device: Device) -> float:
    """Seconds a device loses between two operations: a CPU waits until the next one is started, a
    GPU has it in a queue."""
    if device.name == "cpu":
        return device.launch_seconds
    return min(_GAP, device.launch_seconds)


def efficiency(work: Work, device: Device) -> float:
    """Share of the peak that dense work reaches. The CPU's peaks are rates that are already
    reached."""
    if device.name == "cpu":
        return 1.0
    if work.kind.startswith("attention"):
        best = device.attention if work.kind == "attention" else device.attention_backward
        if not device.processors:
            return best
        blocks = work.count * math.ceil(work.rows / _QUERIES)
        long = work.rows / (work.rows + _DIAGONAL)
        return best * long * blocks / (blocks + _ROUNDS[work.kind] * device.processors)
    if work.kind != "product":
        return device.product
    shape = work.rows, work.columns, work.inner, work.count
    return device.product * _filled(*shape, device.processors) * _rows_read(work, device)


def _rows_read(work: Work, device: Device) -> float:
    """The share of the rate that is left for rows that are not aligned, 0..1."""
    if work.aligned >= _ALIGNED:
        return 1.0
    share = _ODD if work.aligned <= 2 else 1.0
    if device.processors:
        share *= min(1.0, _AMPERE * device.processors / peak_flops(device, work.dtype))
    return share


@cache
def _filled(rows: int, columns: int, inner: int, count: int, processors: int) -> float:
    """The share of a large matmul's rate that is left for these sizes, 0..1."""
    best = 1 / 8  # below that, another kernel is picked
    if not processors:
        filled = rows / (math.ceil(rows / 128) * 128) * columns / (math.ceil(columns / 128) * 128)
        return max(best, filled * inner / (inner + 64))
    for high, wide, share in _TILES:
        tiles = count * math.ceil(rows / high) * math.ceil(columns / wide)
        filled = share * count * rows * columns / (tiles * high * wide)
        rounds = tiles / processors
        busy = rounds / math.ceil(rounds)
        if rounds > 1:
            busy = 1 - _SHARED * (1 - busy)
        best = max(best, filled * busy * inner / (inner + _INNER))
    return best
