"""How Megatron-Bridge's recipes train the models that its tables name.

Releases are tags of NVIDIA-NeMo/Megatron-Bridge: 25.11 is v0.2.0, 26.02 v0.3.0, 26.02.01 v0.3.1,
26.04 v0.4.0, 26.04.01 v0.4.1, 26.06 v0.5.0, 26.06.01 v0.5.1; 26.08 is taken to be as those. Read in
`scripts/performance/configs/*/*_workload_base_configs.py`, by the sizes of a row: `cuda_graph_impl`
and `cuda_graph_scope`. What is in no CUDA graph a process starts one by one. A graph of "attn",
"mamba", "moe_router" and "moe_preprocess" holds all of a layer but its experts. Where all is in one
graph, rows are sent to experts beside another microbatch (`moe_a2a_overlap`). Others that are to do
so take as long as without: GPT OSS on GB200 5.14 s (26.04) for 5.20 (26.02.01), Qwen3 on B300 48.7
(26.02) for 49.6 (26.02.01): a device that waits for its process has nothing to do beside.

Of the rows of 26.02 to 26.08 all have the mesh of a recipe of their release, or of the one before
or after it, but for four of 26.02.01: they are taken to be as all three recipes have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ALL = frozenset({"experts", "router", "rest"})
_EXPERTS = frozenset({"experts"})
_BUT_ROUTER = frozenset({"experts", "rest"})

# By model and device; (device, precision) where these differ. Others have no graphs.
_STARTED: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "DeepSeekV3": {"GB200": _BUT_ROUTER, "GB300": _EXPERTS},
        "GPT OSS 120B": {"B300": _EXPERTS, "GB300": _EXPERTS},
        "Kimi_K2": {},
        "Nemotron_3_Super": {
            "B200 nvfp4": _EXPERTS, "B300": _EXPERTS, "GB200": _EXPERTS, "GB300": _EXPERTS,
        },
        "Qwen3_235B_a22B": {"GB200": _EXPERTS, "GB300 bf16": _BUT_ROUTER, "GB300": _EXPERTS},
    }
)  # fmt: skip
# One graph of a whole iteration, with experts in one fused kernel (`cutedsl_fused_grouped_mlp`).
_WHOLE = ("GPT OSS 120B", "Qwen3_235B_a22B")
_WHOLE_SINCE = (26, 6)


def started(mixture: str, device: str, precision: str, release: str) -> frozenset[str]:
    """Parts of a layer whose operations a process starts one by one: "experts", the "router" before
    them, and the "rest". None where all is in one graph."""
    numbers = tuple(int(part) for part in release.split("."))
    whole = precision == "mxfp8" and device in ("GB200", "GB300") and numbers >= _WHOLE_SINCE
    if whole and mixture in _WHOLE:
        return frozenset()
    known = _STARTED.get(mixture, {})
    return known.get(f"{device} {precision}", known.get(device, _ALL))


# Columns of rows that say what no recipe does: (release, model, device, precision).
_AS_TRAINED: Mapping[tuple[str, str, str, str], Mapping[str, int]] = MappingProxyType(
    {
        ("26.02.01", "Llama-3-70B", "GB300", "mxfp8"): {
            "tp": 1, "pp": 4, "cp": 1, "vpp": 5, "micro_batch": 1,
        },
        ("26.02.01", "Llama-3-70B", "GB300", "nvfp4"): {
            "tp": 1, "pp": 4, "cp": 1, "vpp": 5, "micro_batch": 1,
        },
        ("26.02.01", "Llama-3.1-405B", "GB200", "nvfp4"): {
            "tp": 4, "pp": 16, "cp": 1, "vpp": 8, "micro_batch": 1,
        },
        ("26.02.01", "Llama-3.1-405B", "GB300", "fp8"): {
            "tp": 4, "pp": 8, "cp": 1, "vpp": 4, "micro_batch": 1,
        },
    }
)  # fmt: skip


def as_trained(row: dict[str, str]) -> dict[str, str]:
    """The row of a table, with the columns in which it says what no recipe does as these do."""
    asked = release_of(row["source"]), row["model"], row["gpu_type"], row["precision"]
    known = _AS_TRAINED.get(asked)
    if known is None:
        return row
    ranks = int(row["gpus"]) // (known["tp"] * known["pp"] * known["cp"])
    return row | {name: str(value) for name, value in known.items()} | {"dp": str(ranks)}


def release_of(source: str) -> str:
    """Of a table of Megatron-Bridge."""
    return source.rpartition("NeMo ")[2]
