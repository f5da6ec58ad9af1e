"""How Megatron-Bridge's recipes train the models that its tables name.

Releases are tags of NVIDIA-NeMo/Megatron-Bridge: 25.11 is v0.2.0, 26.02 v0.3.0, 26.02.01 v0.3.1,
26.04 v0.4.0, 26.04.01 v0.4.1, 26.06 v0.5.0, 26.06.01 v0.5.1; 26.08 is taken to be as those. Read in
`scripts/performance/configs/*/*_workload_base_configs.py`, by the sizes of a row: `cuda_graph_impl`
and `cuda_graph_scope`. What is in no CUDA graph a process starts one by one. A graph of "attn",
"mamba", "moe_router" and "moe_preprocess" holds all of a layer but its experts. Where all is in one
graph, rows are sent to experts beside another microbatch (`moe_a2a_overlap`), and elsewhere where
recipes say so.

Of the rows of 26.02 to 26.08 all have the mesh of a recipe of their release, or of the one before
or after it, but for four of 26.02.01: they are taken to be as all three recipes have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ALL = frozenset({"experts", "router", "rest"})
_EXPERTS = frozenset({"experts"})
_BUT_ROUTER = frozenset({"experts", "rest"})

# (model, device, precision or "" for any, since which release, parts); the last that holds. Others
# have no graphs.
_STARTED: tuple[tuple[str, str, str, str, frozenset[str]], ...] = (
    ("DeepSeekV3 (w/o MTP)", "GB200", "", "25.11", _BUT_ROUTER),
    ("DeepSeekV3 (w/o MTP)", "GB300", "", "25.11", _EXPERTS),
    ("DeepSeekV3", "GB200", "mxfp8", "26.02", _EXPERTS),
    ("DeepSeekV3", "B300", "mxfp8", "26.04.01", _EXPERTS),
    ("DeepSeekV3", "B200", "mxfp8", "26.04.01", _EXPERTS),
    ("GPT OSS 120B", "B300", "", "25.11", _EXPERTS),
    ("GPT OSS 120B", "GB300", "", "25.11", _EXPERTS),
    *(("Nemotron_3_Nano", d, "", "26.02", _EXPERTS) for d in ("B200", "B300", "GB200", "GB300")),
    ("Nemotron_3_Super", "B200", "nvfp4", "26.04", _EXPERTS),
    *(("Nemotron_3_Super", d, "", "26.04", _EXPERTS) for d in ("B300", "GB200", "GB300")),
    ("Qwen3_235B_a22B", "GB200", "", "25.11", _EXPERTS),
    ("Qwen3_235B_a22B", "GB300", "", "25.11", _EXPERTS),
    ("Qwen3_235B_a22B", "GB300", "bf16", "25.11", _BUT_ROUTER),
    *(("Qwen3_30B_a3B", d, "", "26.02", _BUT_ROUTER) for d in ("B200", "B300", "GB200", "GB300")),
    ("Qwen3_30B_a3B", "B200", "", "26.04", _EXPERTS),
)
# One graph of a whole iteration, with experts in one fused kernel (`cutedsl_fused_grouped_mlp`).
_WHOLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DeepSeekV3": ("GB200", "GB300"),
        "GPT OSS 120B": ("GB200", "GB300"),
        "Qwen3_235B_a22B": ("GB200", "GB300"),
        "Qwen3_30B_a3B": ("B300", "GB200", "GB300"),
    }
)
_WHOLE_SINCE = "26.06"
# Rows are sent beside another microbatch where a process starts operations (`moe_a2a_overlap`):
# model, device, since which release, until which. The row of B300 in 26.02.01 has the mesh that the
# recipe had in 26.02.
_BESIDE = (
    ("Qwen3_235B_a22B", "H100", "25.11", ""),
    ("Qwen3_235B_a22B", "B200", "25.11", "26.02"),
    ("Qwen3_235B_a22B", "B300", "26.02", "26.04"),
    ("Qwen3_30B_a3B", "H100", "25.11", "26.02.01"),
    ("GPT OSS 120B", "GB200", "26.04", "26.06"),
    ("DeepSeekV3", "B200", "26.04.01", ""),
)
# Of those, rows that go to experts by DeepEP (`moe_flex_dispatcher_backend`).
_DEEP_EP = ("DeepSeekV3",)
# Products and what the tensor axis sends run one after the other (`tp_comm_overlap`): recipes of
# Qwen3 on H100, the only one with such an axis, and of Nemotron 3 Super, and all in 4 bits.
_TENSOR_ALONE = ("Qwen3_235B_a22B", "Nemotron_3_Super")
EXPERTS_AGAIN = frozenset({("Nemotron_3_Nano", "H100")})
"""Mixtures and devices of which layers with experts are made again for the backward."""


def started(mixture: str, device: str, precision: str, release: str) -> frozenset[str]:
    """Parts of a layer whose operations a process starts one by one: "experts", the "router" before
    them, and the "rest". None where all is in one graph."""
    now = _numbers(release)
    if precision == "mxfp8" and device in _WHOLE.get(mixture, ()) and now >= _numbers(_WHOLE_SINCE):
        return frozenset()
    known = [
        parts
        for model, where, bits, since, parts in _STARTED
        if (model, where) == (mixture, device)
        and bits in ("", precision)
        and _numbers(since) <= now
    ]
    return known[-1] if known else _ALL


def beside_another(mixture: str, device: str, release: str) -> bool:
    """Whether rows of a mixture, parts of which a process starts one by one, are sent to their
    experts beside another microbatch."""
    now = _numbers(release)
    return any(
        (model, where) == (mixture, device)
        and _numbers(since) <= now
        and not (until and _numbers(until) <= now)
        for model, where, since, until in _BESIDE
    )


def by_deep_ep(mixture: str, device: str, release: str) -> bool:
    """Whether those rows go by DeepEP, once to each node."""
    return mixture in _DEEP_EP and beside_another(mixture, device, release)


def tensor_in_pieces(mixture: str | None, precision: str) -> bool:
    """Whether products and the collectives of their tensor axis run beside each other."""
    return mixture not in _TENSOR_ALONE and precision != "nvfp4"


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


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
