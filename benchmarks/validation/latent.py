"""Rotary embeddings of latent attention that trains otherwise than ours: in two kernels.

Ours turns queries and keys in single operations, as the model does. With `apply_rope_fusion` one
kernel turns what is to be turned of the queries, where it lies, and one makes keys and values of
what came up from the latent ones and of the keys' part that all heads share, turned; as many in
backward (megatron/core/fusions/fused_mla_yarn_rope_apply.py). Megatron-Bridge sets it, and what it
needs, for DeepSeek and Kimi (`apply_rope_fusion`, `enable_megatron_core_experimental` in
scripts/performance, v0.2.0 to v0.5.0).
"""

from __future__ import annotations

from torch import fx

from benchmarks.validation.mixtures import MIXTURES, Mixture
from benchmarks.validation.rows import Run

STARTS = 2
"""Kernels of a layer in each phase."""
_BYTES = 2  # of a number


def turns(node: fx.Node, run: Run) -> bool:
    """Whether a call does a part of what those kernels do: all between the products of latent
    attention that is not attention itself."""
    if not run.system.latent_rotary or not is_latent(run):
        return False
    between = str(node.meta.get("module", "")).endswith(".self_attn")
    return between and "scaled_dot_product" not in str(node.target)


def is_latent(run: Run) -> bool:
    """Whether keys and values come up from latent ones."""
    return run.kind in MIXTURES and "kv_lora_rank" in MIXTURES[run.kind].more


def moved_bytes(run: Run) -> int:
    """What the kernels of a layer read and write in a phase, of a microbatch on one device."""
    mixture = MIXTURES[run.kind]
    plain, turned = _width(mixture, "qk_nope_head_dim"), _width(mixture, "qk_rope_head_dim")
    value = _width(mixture, "v_head_dim")
    queries = 2 * turned
    keys_and_values = (plain + value) + (plain + turned + value)
    heads = run.heads // run.tensor
    rows = run.microbatch * run.sequence // run.context
    return _BYTES * rows * heads * (queries + keys_and_values)


def _width(mixture: Mixture, name: str) -> int:
    return int(str(mixture.more[name]))
