"""`Cluster`: the devices that a plan runs on, their links and their host.

Known devices are in `planner.cluster.catalogue`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

GIB = 2**30
SCHEMA = 1
"""Schema of a cluster as JSON; a file without the field has this schema, too."""
MOST_DEVICES = 2**20
"""The largest device count of a cluster: several times the largest machines, so more is a mistake.
"""


@dataclass(frozen=True)
class OpTime:
    """Measured seconds of one call on a device. op: ATen name without overload, "product" (a
    matmul) or "optimizer"; dtype: the dtype it computes in; the others as in
    `planner.profile.efficiency.Work`."""

    op: str
    dtype: str = ""
    flops: int = 0
    bytes: int = 0
    rows: int = 0
    columns: int = 0
    inner: int = 0
    count: int = 1
    seconds: float = 0.0


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process.

    ``memory`` in bytes; ``peak_flops`` in FLOP/s by PyTorch dtype name without ``torch.`` (a dtype
    that is missing has no fast path there; "float32" is without TF32, which has its own entry
    "tfloat32"); ``memory_bandwidth`` in bytes/s that a copy reaches, reads and writes counted;
    ``launch_seconds`` is the time a process needs to start an operation. ``processors`` is the
    number of processors that work in parallel (streaming multiprocessors; 0: not known). Of the
    peak, large matmuls reach the share ``product`` (in 8 bits or fewer ``product_8_bits``, 0: the
    same), fused attention ``attention`` and its backward ``attention_backward``, where FLOPs that a
    causal mask skips do not count. ``measured``: measured seconds of ops (`graphaccel calibrate`),
    measured with ``crowd`` processes on each core. ``stepping``: the factor by which an optimizer's
    step takes longer than its bytes predict (`planner.profile.rate_correction`). ``stands_for``:
    the detected GPU, where these are the rates of another device scaled by processors
    (`planner.cluster.detect`).
    """

    name: str
    memory: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    launch_seconds: float
    processors: int = 0
    product: float = 0.7
    attention: float = 0.5
    attention_backward: float = 0.5
    measured: tuple[OpTime, ...] = ()
    crowd: float = 1.0
    stepping: float = 1.0
    product_8_bits: float = 0.0
    stands_for: str = ""

    @property
    def type(self) -> str:
        """The torch device type, "cpu" or "cuda"."""
        return "cpu" if self.name == "cpu" else "cuda"


COLLECTIVES = ("reduce-scatter", "all-gather", "all-to-all")
"""The collectives for which a link can have rates of their own."""


@dataclass(frozen=True)
class Collective:
    """Rates of one of ``COLLECTIVES`` on a link: latency per hop and bytes/s, used in its formula
    in `planner.cluster.communication`."""

    name: str
    latency_seconds: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """One level of the network: ``size`` devices that reach one another at this speed.

    ``bandwidth`` in bytes/s each device sends while it receives as much; ``latency_seconds`` per
    hop. ``measured``: collectives whose measured rates differ (`graphaccel calibrate`).
    """

    name: str
    latency_seconds: float
    bandwidth: float
    size: int
    measured: tuple[Collective, ...] = ()

    def rates(self, collective: str) -> tuple[float, float]:
        """(seconds per hop, bytes/s) of a collective or of a message; the link's own rates where
        nothing else was measured."""
        for row in self.measured:
            if row.name == collective:
                return row.latency_seconds, row.bandwidth
        return self.latency_seconds, self.bandwidth


@dataclass(frozen=True)
class StepTime:
    """A measured step (`graphaccel plan --measure N --refine FILE`), and the prediction for it by
    the cluster's own rates; all in seconds.

    ``model``: its key (`planner.profile.rate_correction.model_key`), ``name`` in words;
    ``precision``: the pin; ``plan``: its name, on ``devices``. Predicted: ``compute`` (with what
    waits for it in a pipeline), ``communication``, ``optimizer``. Measured: ``took``, forward and
    backward, and ``optimizer_took``, the optimizer's step; it is 0 where the optimizer's step
    includes communication, and is then part of ``took``.
    """

    model: str
    name: str
    precision: str
    plan: str
    devices: int
    compute: float
    communication: float
    optimizer: float
    took: float
    optimizer_took: float = 0.0


@dataclass(frozen=True)
class Host:
    """A device's share of its host machine, for what a plan offloads.

    ``memory`` in bytes; ``memory_bandwidth`` in bytes/s that its processors reach, reads and writes
    counted; ``link`` in bytes/s that a copy between host and device reaches, one way at a time.
    ``shared``: the device is the host's own processor, and their memory is the same.
    """

    memory: int
    memory_bandwidth: float
    link: float
    shared: bool = False


@dataclass(frozen=True)
class Cluster:
    """``count`` identical devices; ``links`` from the innermost level outwards, the last holds all.

    ``context_bytes`` per device are lost to the runtime (CUDA context, NCCL, cuBLAS workspaces);
    ``fragmentation`` is what the allocator reserves beyond the tensors, as a share of them.
    ``ort``: by build of ONNX Runtime and threads ("training 1.19.2, 2 threads"), region key →
    seconds measured here (torch, ONNX Runtime). ``host``: of each device; where it is not known,
    nothing is offloaded. ``steps``: measured seconds of full steps. ``refined_by``: the steps by
    which the rates are already corrected (`planner.profile.rate_correction`); not written to a
    file.
    Raises ``ValueError`` for no devices or more than ``MOST_DEVICES``, when the levels do not grow,
    when the size of a level is no multiple of the level inside it (the last level may have any
    size), or when the last does not hold all devices.
    """

    device: Device
    count: int
    links: tuple[Link, ...]
    context_bytes: int
    fragmentation: float
    ort: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict, hash=False)
    host: Host | None = None
    steps: tuple[StepTime, ...] = ()
    refined_by: tuple[StepTime, ...] = ()

    def __post_init__(self) -> None:
        sizes = [link.size for link in self.links]
        if self.count < 1:
            raise ValueError(f"a cluster needs at least one device, not {self.count}")
        if self.count > MOST_DEVICES:
            raise ValueError(too_many_devices(self.count))
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"link levels must grow outwards, not {sizes}")
        if any(outer % inner for inner, outer in pairwise(sizes[:-1])):
            raise ValueError(f"each link level must hold whole ones of the last, not {sizes}")
        if sizes[-1] < self.count:
            raise ValueError(f"the last link level holds {sizes[-1]} of {self.count} devices")

    @cached_property
    def bare(self) -> Cluster:
        """This cluster without the devices' memory, which changes no predicted time."""
        return replace(self, device=replace(self.device, memory=0))

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Cache of what is derived from the links (`planner.cluster.communication`)."""
        return {}

    @property
    def tensor_budget(self) -> int:
        """Bytes of tensors that fit one device, after subtracting context and fragmentation."""
        return max(0, int((self.device.memory - self.context_bytes) / (1 + self.fragmentation)))

    def verdict(self, tensors: float) -> str:
        """Whether that many bytes of tensors fit one device: "safe", "likely" (if the allocator
        wastes little), "risky" (the tensors fit, but hardly more) or "impossible"."""
        free = self.device.memory - self.context_bytes
        if tensors * (1 + self.fragmentation) <= free:
            return "safe"
        if tensors * (1 + self.fragmentation / 2) <= free:
            return "likely"
        return "risky" if tensors <= self.device.memory else "impossible"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; ``from_json`` reads them back."""
        return {
            "schema": SCHEMA,
            "device": {**asdict(self.device), "peak_flops": dict(self.device.peak_flops)},
            "count": self.count,
            "links": [asdict(link) for link in self.links],
            "context_bytes": self.context_bytes,
            "fragmentation": self.fragmentation,
            **({"ort": {k: dict(v) for k, v in self.ort.items()}} if self.ort else {}),
            **({"host": asdict(self.host)} if self.host is not None else {}),
            **({"steps": [asdict(step) for step in self.steps]} if self.steps else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of ``to_json``. Raises ``ValueError`` for missing or unknown fields."""
        try:
            fields = {key: value for key, value in data.items() if key != "schema"}
            device = dict(fields["device"])
            device["measured"] = tuple(OpTime(**row) for row in device.get("measured", ()))
            fields["device"] = Device(**device)
            fields["links"] = tuple(_link_of(link) for link in fields["links"])
            fields["ort"] = {
                build: {key: (float(a), float(b)) for key, (a, b) in costs.items()}
                for build, costs in fields.get("ort", {}).items()
            }
            if fields.get("host") is not None:
                fields["host"] = Host(**fields["host"])
            fields["steps"] = tuple(StepTime(**row) for row in fields.get("steps", ()))
            return cls(**fields)
        except (AttributeError, KeyError, TypeError) as problem:
            raise ValueError(f"this is no cluster description: {problem}") from problem


def _link_of(data: Mapping[str, Any]) -> Link:
    rows = tuple(Collective(**row) for row in data.get("measured", ()))
    return Link(**{**data, "measured": rows})


def too_many_devices(count: int) -> str:
    """The error text for more devices than ``MOST_DEVICES``."""
    return f"a cluster has at most {MOST_DEVICES} devices, not {count}"


_UNITS = {"b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def cluster_name(cluster: Cluster) -> str:
    """`4 x h100-80gb`: the cluster as a plan names it."""
    return f"{cluster.count} x {cluster.device.name}"


def parse_bytes(text: str) -> int:
    """ "80GiB", "1.5 GB", "512MiB" or a plain number of bytes -> bytes.

    GB is 10**9 and GiB is 2**30; case does not matter. Raises ``ValueError`` otherwise, for a bare
    "80G" too, which could mean either.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or (match[2] or "b") not in _UNITS:
        raise ValueError(f"{text!r} is no amount of memory; write it like 80GiB, 512MiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2] or "b"])
