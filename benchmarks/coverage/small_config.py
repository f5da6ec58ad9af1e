"""Small configurations of transformers' models, made of the default one by names of fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS, EXPERTS = 64, 4, 2, 128, 64, 4

_NO_CHANCE = re.compile(
    r".*(dropout|drop_path|drop_rate|pdrop|layerdrop|jitter|_dropout_prob|mask_time_prob"
    r"|mask_feature_prob).*"
)
"""Probabilities: a split draws other numbers, so nothing could be compared."""

_LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|num_(encoder_|decoder_)?blocks|depth"
    r"|(en|de)coder_layers|num_(en|de)coder_layers)"
)
_COUNTS: tuple[tuple[str, int], ...] = (
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads)", HEADS),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads)", 2),
    (r"(head_dim|d_kv|kv_channels|attention_head_dim|.*_head_dim|mamba_d_head)", WIDTH // HEADS),
    (r"mamba_n_heads", 8),
    (r"(q_lora_rank|kv_lora_rank|rotary_dim)", 16),
    (
        r"(hidden_size|hidden_size_global|d_model|n_embd|dim|embed_dim|hidden_dim|emb_dim|embedding_size)",
        WIDTH,
    ),
    (r"(intermediate_size|(en|de)coder_ffn_dim|ffn_dim|d_ff|ffn_hidden_size|n_inner|dff)", 96),
    (r"((moe|shared|shared_expert|dense)_intermediate_size|expert_ffn_hidden_size)", 32),
    (r"(linear_num_key_heads|index_n_heads)", 2),
    (r"linear_num_value_heads", 4),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts)", EXPERTS),
    (r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_k)", 2),
    (
        r"(n_group|num_expert_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace)",
        1,
    ),
    (r"mamba_d_ssm", 128),
    (r"(attn|expert)_layer_period", 2),
    (r"(attn|expert)_layer_offset", 1),
    (r"(d_latents|num_latents)", 32),
    (r"num_self_attends_per_block", 2),
    (r"(image_size)", 32),
    (r"(conv_dim)", 32),
)
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|entity_vocab_size)", VOCABULARY),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_length)", POSITIONS),
    (r"(num_nextn_predict_layers|num_kv_shared_layers)", 0),
)
_TOKEN = re.compile(r".*(_token_id|_token_index|_index|_id)")
_LISTS = re.compile(r"(depths|num_blocks|stage_num_blocks|num_block_repeats|block_repeats)")

_FILLED: Mapping[str, Any] = {
    "head_dim": WIDTH // HEADS,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
    "topk_group": 1,
    "vocab_size": VOCABULARY,
}
"""Fields that some defaults leave empty although the model needs them."""
_STAGES = ("out_features", "out_indices", "stage_names")
"""Names of layers, which a configuration makes by itself."""

_LEVELS = ("all", "filled", "counts", "layers", "default")
"""Which fields are made small: from all that are known (and empty ones filled) to none."""


def smaller(default: Mapping[str, Any], level: str) -> dict[str, Any]:
    """The fields of a configuration, and of those in it, at one of `_LEVELS`."""
    found: dict[str, Any] = {}
    filled, level = level == "filled", "all" if level == "filled" else level
    layers = {v for n, v in default.items() if _LAYERS.fullmatch(n) and isinstance(v, int)}
    kept = _kept(default, layers - {0, 1, LAYERS})
    for name, value in default.items():
        if name in _STAGES and level != "default":
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            found[name] = smaller(value, level)
        elif _NO_CHANCE.fullmatch(name) and isinstance(value, float):
            found[name] = 0.0
        elif level == "default":
            found[name] = value
        elif isinstance(value, (list, tuple)) and len(value) in layers - {0, 1, LAYERS}:
            found[name] = [value[i] for i in kept] or list(value[-LAYERS:])  # one for each layer
        elif filled and value is None:
            found[name] = _FILLED.get(name)
        else:
            found[name] = _small(name, value, level)
            if kept and _LAYERS.fullmatch(name) and isinstance(value, int):
                found[name] = min(value, len(kept))
    if level == "all" and "qk_rope_head_dim" in found:  # latent attention: keys for every head,
        found |= {"qk_head_dim": 2 * (WIDTH // HEADS), "num_key_value_heads": HEADS}  # in two parts
    if level == "all" and "state_size" in found and found.get("num_heads"):  # of wider states
        found["num_heads"] = found.get("expand", 1) * HEADS
    return found


def _kept(default: Mapping[str, Any], layers: set[int]) -> list[int]:
    """Positions of layers that have among them every kind of layer that lists by layer name."""
    lists = [
        v
        for v in default.values()
        if isinstance(v, (list, tuple)) and len(v) in layers and all(isinstance(x, str) for x in v)
    ]
    if not lists:
        return []
    count = len(lists[0])
    seen: set[tuple[int, str]] = set()
    chosen: set[int] = set()
    for i in range(count):
        kinds = {(j, kind[i]) for j, kind in enumerate(lists) if len(kind) == count}
        if not kinds <= seen:
            chosen.add(i)
            seen |= kinds
    for i in range(count):
        if len(chosen) < LAYERS:
            chosen.add(i)
    return sorted(chosen)


def _small(name: str, value: Any, level: str) -> Any:
    if isinstance(value, bool) or not value:
        return value
    if isinstance(value, int):
        if _LAYERS.fullmatch(name):
            return min(value, LAYERS)
        known = (*_SIZES, *(_COUNTS if level == "all" else ())) if level != "layers" else ()
        for pattern, size in known:
            if re.fullmatch(pattern, name):
                return min(value, size)
        if level != "layers" and _TOKEN.fullmatch(name) and value >= VOCABULARY:
            return value % 3
        return value
    if isinstance(value, dict):  # by number of the layer
        return {k: v for k, v in value.items() if not str(k).isdigit() or int(k) < LAYERS}
    if name == "attention_types":  # GPT-Neo's: pairs of kinds of layers and how often they come
        return [[kinds, 1] for kinds, _ in value[:1]]
    if isinstance(value, (list, tuple)):
        if _LISTS.fullmatch(name) and all(isinstance(n, int) for n in value):
            return [min(n, 1) for n in value]
        if level == "all" and name == "conv_dim" and all(isinstance(n, int) for n in value):
            return [32] * len(value)
    return value


def first_small(
    default: Mapping[str, Any], works: Callable[[dict[str, Any]], Any], most: int
) -> Any:
    """What `works` gives for the first level at which it raises nothing.

    most: parameters beyond which a model is not small; `works` gives (parameters, result).
    Raises the first level's error if no level works.
    """
    first: Exception | None = None
    for level in _LEVELS:
        try:
            count, result = works(smaller(default, level))
        except Exception as error:
            first = first or error
            continue
        if count <= most:
            return result
        first = first or ValueError(f"{count:,} parameters at the smallest that works")
        break
    assert first is not None
    raise first
