"""The catalogue: known devices by name, with their rates, links and hosts.

Figures are rates a program reaches, not the datasheet's, except ``peak_flops``, which a cost model
multiplies by an efficiency of its own. Datasheet numbers and the factors applied to them:

* Peaks, memory bandwidth, NVLink: NVIDIA V100 datasheet (Jan 2020), A100 datasheet (June 2021),
  H100 datasheet (SXM5, Tensor Core figures without sparsity), H200 datasheet (Nov 2023), HGX B200
  and GB200 NVL72 (Blackwell datasheet, 2024), HGX B300 and GB300 NVL72 (Blackwell Ultra datasheet,
  2025), Ada GPU architecture whitepaper (RTX 4090, FP32 accumulation), T4, L4, L40S and RTX A6000
  datasheets, GA102 and RTX Blackwell whitepapers (RTX 3090, RTX 5090). Figures of a rack or board
  are divided by its 72 or 8 devices. "float4_e2m1fn_x2" is NVFP4.
* On devices on which none of the published runs was trained, matmuls reach 0.82 of the fastest
  large matmul of PyTorch (zzc0721/torch-performance-test-data: 42 TFLOP/s on T4, 269 on L40S, 123
  on RTX A6000, 76.6 on RTX 3090, 238 on RTX 5090), as training does on A100 (0.70 of the peak for
  264 of 312) and H100 (0.68 for 789 of 989). There is no measurement of an L4: half its peak is
  assumed.
* A copy reaches 0.9 of the memory bandwidth (3.0 of 3.35 TB/s on H100, 4.3 of 4.8 on H200).
* NVLink per link and direction as NCCL models it (``src/graph/topo.h``): 20 GB/s (V100, A100), 20.6
  (H100, H200), 40.1 (B200), of 25, 25, 26.5 and 50. Latencies per hop are those of its ring with
  the LL128 protocol (``src/graph/tuning.cc``): 1.9 us NVLink, 2.5 us PCIe, 4.0 us network.
* Networks as in NVIDIA's own DGX of that generation, shared evenly by its devices (a rack of GB200
  has one ConnectX-7 for each, B300 and GB300 one ConnectX-8); 0.95 reached. NVLink joins eight
  devices, those of an NVL72 rack all 72.
* Hosts are NVIDIA's DGX of that generation, shared evenly by eight devices: system memory (512 GB
  in DGX-1, 1 and 2 TB in DGX A100 of 40 and 80 GB, 2 TB in DGX H100, H200, B200 and B300), of which
  a tenth is left to the system, and all channels of two sockets (8 DDR4-2133, 16 DDR4-3200, 16
  DDR5-4800, 16 DDR5-5600, 16 DDR5-6400). For RTX cards a server like that of the A100 with 512 GB
  is assumed; T4, L4 and L40S are in cloud instances (g4dn.12xlarge: four in 192 GB with 50 Gb/s;
  g6.48xlarge: eight in 768 GB with 100; g6e.48xlarge: eight in 1.5 TB with 400). Two devices of an
  NVL72 rack share a Grace: 17 TB of LPDDR5X for 36 of them, at 18.4 (GB200) and 14.3 TB/s (GB300).
* A Grace starts operations twice as slowly as the Xeon of a DGX H100, according to published
  mixtures (``benchmarks.validation``); ``nn.Linear`` alone takes 37.1 us there and 13.5 us here
  (NVIDIA/TransformerEngine, issue 2053).
* Links to the host: PCIe x16 of the device's datasheet (3.0: V100, T4; 4.0: A100, L4, L40S, RTX
  3090, 4090 and A6000; 5.0: H100, H200, B200, RTX 5090, and of B300 its host's), 15.75, 31.5 and 63
  GB/s each way; NVLink-C2C of a Grace, 450 GB/s each way for two. A copy from pinned memory reaches
  0.8 of that. That devices share an uplink of the host's switches is not modelled.
* Memory is what the CUDA runtime reports, e.g. in PyTorch's "total capacity of 79.11 GiB": a little
  under the number in the name. ``b200-192gb`` carries 192 GB, of which 180 GB are enabled. For
  GB200, B300 and GB300 0.996 of what nvidia-smi says, 189471, 275040 and 284208 MiB, as for B200.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from graphaccel.errors import BadCluster, UnknownDevice
from graphaccel.planner.cluster.cluster import (
    GIB,
    MOST_DEVICES,
    Cluster,
    Device,
    Host,
    Link,
    too_many_devices,
)


def cluster(device: str, count: int, memory: int | None = None) -> Cluster:
    """``count`` devices called ``device`` (one of ``device_names()``, any case), with their usual
    links.

    ``memory`` in bytes per device overrides the catalogue's. "cpu" is this host: its cores and
    memory shared evenly by ``count`` processes.
    Raises ``graphaccel.errors.UnknownDevice`` (GA601), and ``BadCluster`` (GA602) for a count below
    one or above ``MOST_DEVICES`` or a memory that is not positive.
    """
    name = device.lower()
    problems = [] if count > 0 else [f"a cluster needs at least one device, not {count}"]
    if count > MOST_DEVICES:
        problems.append(too_many_devices(count))
    if memory is not None and memory <= 0:
        problems.append(f"a memory of {memory} bytes holds nothing")
    if problems:
        raise BadCluster(where=f"{count} x {device}", problems=tuple(problems))
    if name not in _CATALOGUE:
        closest = difflib.get_close_matches(name, device_names(), n=3, cutoff=0.4)
        raise UnknownDevice(name=device, closest=tuple(closest), known=device_names())
    result = _CATALOGUE[name](count)
    if memory is not None:
        result = replace(result, device=replace(result.device, memory=memory))
    return result


def device_names() -> tuple[str, ...]:
    """The names of the devices in the catalogue."""
    return tuple(_CATALOGUE)


RESERVED = 0.07
"""Bytes that PyTorch's CUDA allocator reserves beyond the tensors, as a share of the tensors'
bytes: the 90th percentile (0.069; 0.033 to 0.093, mean 0.051) of the 27 published runs that report
both (SimuMax, B200; benchmarks/validation/data)."""
_CUDA_CONTEXT_BYTES = 3 * GIB // 2
LAUNCH_SECONDS = 7e-6  # to start an operation, on an x86 host
_GRACE_LAUNCH_SECONDS = 14e-6
_NETWORK_REACHED = 0.95


@dataclass(frozen=True)
class _Kernels:
    """Processors of a device, and the share of the datasheet that kernels reach on it: matmuls and
    attention of the peak, copies of the memory's bandwidth (`benchmarks.validation --fit`)."""

    processors: int
    product: float
    attention: float
    attention_backward: float
    copy: float = 0.9
    product_8_bits: float = 0.0


_OF_V100 = _Kernels(80, 0.7, 0.4, 0.3)
_OF_A100 = _Kernels(108, 0.70, 0.8, 0.66, 0.8)
_OF_H100 = _Kernels(132, 0.68, 0.6, 0.49, product_8_bits=0.58)
_OF_ADA = _Kernels(128, 0.8, 0.6, 0.5)
_OF_T4 = _Kernels(40, 0.53, 0.4, 0.3)
_OF_L4 = _Kernels(58, 0.5, 0.4, 0.33)
_OF_L40S = _Kernels(142, 0.61, 0.5, 0.41)
_OF_A6000 = _Kernels(84, 0.65, 0.6, 0.5, 0.8)
_OF_3090 = _Kernels(82, 0.88, 0.6, 0.5, 0.8)
_OF_5090 = _Kernels(170, 0.93, 0.6, 0.5)
KILOWATTS: Mapping[str, float] = MappingProxyType(
    {"b200": 1.0, "b300": 1.1, "gb200": 1.2, "gb300": 1.4}
)
"""Power limit in kilowatts of a Blackwell device in each of its machines (their datasheets)."""


def by_power(power: float, dtype: str) -> float:
    """The factor by which the rate of large matmuls in a torch dtype changes where a device may
    draw ``power`` times as many watts: at 600 of 700 W pretraining on H100 loses 10 to 15 % of its
    throughput, in 8 bits 15 to 20 % (factryze.ai, scale-atlas/power/power-capping)."""
    return power ** (1.25 if dtype.startswith(("float8", "float4")) else 0.87)


def _of_blackwell(machine: str, processors: int) -> _Kernels:
    """The kernels of a Blackwell device. Its machines have identical chips with different power
    limits: rates are those of a B200 scaled by power, whatever the peaks in their datasheets."""
    power, peaks = KILOWATTS[machine], _GB200 if machine.startswith("g") else _B200

    def share(reached: float, dtype: str) -> float:
        return reached * by_power(power, dtype) * _B200[dtype] / peaks[dtype]

    product, product_8_bits = share(0.52, "bfloat16"), share(0.46, "float8_e4m3fn")
    return _Kernels(processors, product, 0.8 * 0.71, 0.8 * 0.6, 0.6, product_8_bits)


def _cuda(
    name: str,
    memory_gib: float,
    teraflops: Mapping[str, float],
    memory_terabytes: float,
    inner: Link,
    network: str,
    network_gigabits: float,
    kernels: _Kernels,
    host: Host,
    launch_seconds: float = LAUNCH_SECONDS,
) -> tuple[str, Callable[[int], Cluster]]:
    """A catalogue entry: nodes of ``inner.size`` devices, ``network_gigabits`` for each device."""
    device = Device(
        name,
        int(memory_gib * GIB),
        {dtype: value * 1e12 for dtype, value in teraflops.items()},
        memory_terabytes * 1e12 * kernels.copy,
        launch_seconds,
        kernels.processors,
        kernels.product,
        kernels.attention,
        kernels.attention_backward,
        product_8_bits=kernels.product_8_bits,
    )
    bandwidth = network_gigabits / 8 * 1e9 * _NETWORK_REACHED

    def make(count: int) -> Cluster:
        nodes = -(-count // inner.size)
        outer = (Link(network, 4.0e-6, bandwidth, nodes * inner.size),) if nodes > 1 else ()
        return Cluster(device, count, (inner, *outer), _CUDA_CONTEXT_BYTES, RESERVED, host=host)

    return name, make


# Per core: a matmul of 1024 x 1024 reached 72 (float32), 50 (float64), 474 (bfloat16, with AVX-512
# BF16) and 1 to 3 (float16) GFLOP/s on a 2025 server core, a copy 37 GB/s. Older cores reach half,
# and bfloat16 is no faster than float32 where it is emulated; these rates are chosen to hold there
# too.
_CORE_GIGAFLOPS = {"float64": 20.0, "float32": 40.0, "bfloat16": 20.0, "float16": 1.0}
_CORE_BANDWIDTH = 10e9
_HOST_BANDWIDTH = 200e9
_CPU_CONTEXT_BYTES = 512 * 2**20  # the interpreter, torch's libraries and gloo's buffers


def _cpu(count: int) -> Cluster:
    cores = os.cpu_count() or 1
    share = cores / count  # of a core; below one, processes take turns
    memory, bandwidth = host_memory() // count, min(_CORE_BANDWIDTH * cores, _HOST_BANDWIDTH)
    device = Device(
        "cpu",
        memory,
        {dtype: value * 1e9 * share for dtype, value in _CORE_GIGAFLOPS.items()},
        bandwidth / count,
        5e-6,
    )
    # gloo over loopback with two processes: 0.8 ms for a small all_reduce, 21 ms for 32 MiB. If
    # there are more processes than cores, they wait for each other at every hop.
    turns = max(1.0, 1 / share)
    loopback = Link("gloo over loopback", 3e-4 * turns, 1.5e9 / turns, count)
    host = Host(
        memory, bandwidth / count, bandwidth / count / 2, shared=True
    )  # it reads and writes
    return Cluster(device, count, (loopback,), _CPU_CONTEXT_BYTES, 0.05, host=host)


def host_memory() -> int:
    """Bytes of memory of this host, or of its container where that has less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else "max"
    return physical if allowed == "max" else min(physical, int(allowed))


_PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
_COPIED = 0.8  # share reached of a PCIe link or of the host's memory bandwidth


def _host(gibibytes: int, channels: int, transfers: float, pcie: int, devices: int = 8) -> Host:
    """The host share of one of ``devices`` devices: the machine's memory, its channels of 8 bytes a
    transfer, and millions of transfers a second."""
    bandwidth = channels * 8 * transfers * 1e6 * _COPIED / devices
    return Host(int(0.9 * gibibytes * GIB / devices), bandwidth, _PCIE[pcie] * _COPIED)


def _grace(terabytes_per_second: float) -> Host:
    """The host share of one of the 72 devices of an NVL72 rack."""
    bandwidth = terabytes_per_second * 1e12 * _COPIED / 72
    return Host(int(0.9 * 17e12 / 72), bandwidth, min(450e9 / 2 * _COPIED, bandwidth))


def _nvlink(generation: int, links: int, gigabytes_per_link: float, size: int = 8) -> Link:
    return Link(f"NVLink {generation}", 1.9e-6, links * gigabytes_per_link * 1e9, size)


_V100 = {"float64": 7.8, "float32": 15.7, "float16": 125}
_A100 = {"float64": 9.7, "float32": 19.5, "tfloat32": 156, "bfloat16": 312, "float16": 312}
_H100 = {
    "float64": 34, "float32": 67, "tfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4,
    "float8_e4m3fn": 1978.9,
}  # fmt: skip
_B200 = {
    "float64": 37, "float32": 75, "tfloat32": 1100, "bfloat16": 2250, "float16": 2250,
    "float8_e4m3fn": 4500, "float4_e2m1fn_x2": 9000,
}  # fmt: skip
_B300 = {**_B200, "float64": 1.25, "float4_e2m1fn_x2": 13500}
_GB200 = {
    "float64": 40, "float32": 80, "tfloat32": 1250, "bfloat16": 2500, "float16": 2500,
    "float8_e4m3fn": 5000, "float4_e2m1fn_x2": 10000,
}  # fmt: skip
_GB300 = {**_GB200, "float64": 1.39, "float4_e2m1fn_x2": 15000}
_ADA = {
    "float64": 1.29, "float32": 82.6, "tfloat32": 82.6, "bfloat16": 165.2, "float16": 165.2,
    "float8_e4m3fn": 330.3,
}  # fmt: skip

_T4 = {"float64": 0.25, "float32": 8.1, "float16": 65}
_L4 = {
    "float64": 0.47, "float32": 30.3, "tfloat32": 60, "bfloat16": 121, "float16": 121,
    "float8_e4m3fn": 242.5,
}  # fmt: skip
_L40S = {
    "float64": 1.43, "float32": 91.6, "tfloat32": 183, "bfloat16": 362, "float16": 362,
    "float8_e4m3fn": 733,
}  # fmt: skip
_A6000 = {"float64": 0.6, "float32": 38.7, "tfloat32": 77.4, "bfloat16": 154.8, "float16": 154.8}
_3090 = {"float64": 0.56, "float32": 35.6, "tfloat32": 35.6, "bfloat16": 71, "float16": 71}
_5090 = {
    "float64": 1.64, "float32": 104.8, "tfloat32": 104.8, "bfloat16": 209.5, "float16": 209.5,
    "float8_e4m3fn": 419,
}  # fmt: skip

# GeForce cards and cloud GPUs have no peer-to-peer copies: NCCL stages through host memory, both
# ways over one PCIe 4.0 x16 slot (32 GB/s each way on paper).
_PCIE_STAGED = Link("PCIe 4.0 through host memory", 2.5e-6, 10e9, 8)
_PCIE_3_STAGED = Link("PCIe 3.0 through host memory", 2.5e-6, 5e9, 4)
_PCIE_5_STAGED = Link("PCIe 5.0 through host memory", 2.5e-6, 20e9, 8)

_EDR, _EDR_4 = (f"InfiniBand EDR, {ports} per node" for ports in ("1 port", "4 ports"))
_CUDA = (
    _cuda("v100-32gb", 31.73, _V100, 0.9, _nvlink(2, 6, 20.0), _EDR_4, 50,
          _OF_V100, _host(512, 8, 2133, 3)),
    _cuda("v100-16gb", 15.77, _V100, 0.9, _nvlink(2, 6, 20.0), _EDR_4, 50,
          _OF_V100, _host(512, 8, 2133, 3)),
    _cuda("a100-40gb", 39.38, _A100, 1.555, _nvlink(3, 12, 20.0), "InfiniBand HDR", 200,
          _OF_A100, _host(1024, 16, 3200, 4)),
    _cuda("a100-80gb", 79.15, _A100, 2.039, _nvlink(3, 12, 20.0), "InfiniBand HDR", 200,
          _OF_A100, _host(2048, 16, 3200, 4)),
    _cuda("h100-80gb", 79.1, _H100, 3.35, _nvlink(4, 18, 20.6), "InfiniBand NDR", 400,
          _OF_H100, _host(2048, 16, 4800, 5)),
    _cuda("h200-141gb", 139.72, _H100, 4.8, _nvlink(4, 18, 20.6), "InfiniBand NDR", 400,
          _OF_H100, _host(2048, 16, 4800, 5)),
    _cuda("b200-192gb", 178.35, _B200, 7.7, _nvlink(5, 18, 40.1), "InfiniBand NDR", 400,
          _of_blackwell("b200", 148), _host(2048, 16, 5600, 5)),
    _cuda("b300-288gb", 267.5, _B300, 8.0, _nvlink(5, 18, 40.1), "InfiniBand XDR", 800,
          _of_blackwell("b300", 148), _host(2048, 16, 6400, 5)),
    _cuda("gb200-192gb", 184.3, _GB200, 8.0, _nvlink(5, 18, 40.1, 72), "InfiniBand NDR", 400,
          _of_blackwell("gb200", 152), _grace(18.4), _GRACE_LAUNCH_SECONDS),
    _cuda("gb300-288gb", 276.4, _GB300, 8.0, _nvlink(5, 18, 40.1, 72), "InfiniBand XDR", 800,
          _of_blackwell("gb300", 152), _grace(14.3), _GRACE_LAUNCH_SECONDS),
    _cuda("rtx4090-24gb", 23.64, _ADA, 1.008, _PCIE_STAGED, _EDR, 12.5,
          _OF_ADA, _host(512, 16, 3200, 4)),
    _cuda("rtx5090-32gb", 31.36, _5090, 1.792, _PCIE_5_STAGED, _EDR, 12.5,
          _OF_5090, _host(512, 16, 4800, 5)),
    _cuda("rtx3090-24gb", 23.69, _3090, 0.936, _PCIE_STAGED, _EDR, 12.5,
          _OF_3090, _host(512, 16, 3200, 4)),
    _cuda("a6000-48gb", 47.54, _A6000, 0.768, _PCIE_STAGED, _EDR, 12.5,
          _OF_A6000, _host(512, 16, 3200, 4)),
    _cuda("l40s-48gb", 44.42, _L40S, 0.864, _PCIE_STAGED, "Ethernet, 400 Gb/s per node", 50,
          _OF_L40S, _host(1536, 24, 4800, 4)),
    _cuda("l4-24gb", 22.05, _L4, 0.3, _PCIE_STAGED, "Ethernet, 100 Gb/s per node", 12.5,
          _OF_L4, _host(768, 16, 3200, 4)),
    _cuda("t4-16gb", 14.75, _T4, 0.32, _PCIE_3_STAGED, "Ethernet, 50 Gb/s per node", 12.5,
          _OF_T4, _host(192, 6, 2933, 3, 4)),
)  # fmt: skip
_CATALOGUE: Mapping[str, Callable[[int], Cluster]] = MappingProxyType({"cpu": _cpu, **dict(_CUDA)})
