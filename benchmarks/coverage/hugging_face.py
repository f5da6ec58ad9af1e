"""Entries of transformers' auto-model mappings, each from a small configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.entry import SEED, Entry, NotMeasured, first_line
from benchmarks.coverage.small_config import HEADS, VOCABULARY, first_small
from benchmarks.coverage.vision import declare_operators

MAPPINGS: Mapping[str, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
"""Kinds of models, and transformers' mapping of model types to classes."""

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_WIDEST = 224  # pixels: more take gigabytes and show nothing else
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # what its forward sets for short sequences
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 512, "num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY}},
    "dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "dory": {
        "layer_types": None,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": 1,
        "num_hidden_layers": 3,
    },
    "dots3_note": {"head_dim": 32},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": HEADS, "vocab_size": VOCABULARY},
    "image/efficientnet": {
        "depth_coefficient": 0.5,
        "hidden_dim": 640,
        "width_coefficient": 0.5,
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "perceiver": {"max_position_embeddings": 16},
    "pvt": {"image_size": 64, "num_encoder_blocks": 4},
    "qwen4_exp": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "ngram_vocab_size_base": 512,
        "split_ngram_parts": 1,
    },
    "causal/reformer": {"is_decoder": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "marian": {"decoder_vocab_size": VOCABULARY, "pad_token_id": 0},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"embedding_dim": 64, "num_blocks": 2, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "hybrid_layer_ids": [1],
        "mamba_headdim": 16,
        "attention_head_dim": 32,
    },
}
"""What no rule by names of fields can know, by model type or by kind and model type."""

MOST_PARAMETERS = 40_000_000
BATCH, TOKENS, CLASSES, SAMPLES = 4, 16, 4, 3200


def names() -> list[str]:
    """`kind/model type` of every class; one that several types share stands once in each kind."""
    from transformers.models.auto import modeling_auto

    found = []
    for kind, mapping in MAPPINGS.items():
        classes: set[str] = set()
        for model_type, name in sorted(getattr(modeling_auto, mapping).items()):
            named = name if isinstance(name, str) else name[0]
            if named not in classes:
                classes.add(named)
                found.append(f"{kind}/{model_type}")
    return found


def entry(name: str, *, split: bool, dtype: torch.dtype = torch.float64) -> Entry:
    """The model of a type with a batch of 4; it computes its own loss."""
    config = _config(name, dtype)
    model, kwargs = _made(name, config, dtype)
    return Entry(_Loss(model), (), kwargs)


class _Loss(nn.Module):
    """The model's loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor, **kwargs: Any) -> Tensor:
        output = self.model(labels=labels, **kwargs)
        if "loss" in output:
            return output.loss
        return F.cross_entropy(output.last_hidden_state, labels)  # PP-LCNet's logits, without loss


@functools.lru_cache(maxsize=8)
def _config(name: str, dtype: torch.dtype) -> Any:
    """The smallest configuration with which the model runs in eager mode."""
    kind, model_type = name.split("/")
    try:
        kind_of = _class(name).config_class
        default = kind_of().to_dict()
    except Exception as error:
        raise NotMeasured(f"no default configuration: {first_line(error)}") from error

    def works(fields: dict[str, Any]) -> tuple[int, Any]:
        if kind in ("image", "audio"):
            fields |= {"id2label": {i: str(i) for i in range(CLASSES)}, "num_labels": CLASSES}
            fields["label2id"] = {str(i): i for i in range(CLASSES)}
        if kind == "seq2seq" and fields.get("decoder_start_token_id") is None:
            fields |= {"decoder_start_token_id": 0, "pad_token_id": fields.get("pad_token_id") or 0}
        fields |= _FIELDS.get(name, {}) | _FIELDS.get(model_type, {})
        config = kind_of.from_dict(fields)
        with torch.device("meta"):
            count = sum(p.numel() for p in _class(name)(config).parameters())
        if count <= MOST_PARAMETERS:
            model, kwargs = _made(name, config, dtype)
            if not _Loss(model)(**kwargs).requires_grad:
                raise ValueError("the loss needs no gradient")
        return count, config

    try:
        return first_small(default, works, MOST_PARAMETERS)
    except Exception as error:
        raise NotMeasured(f"no small configuration: {first_line(error)}") from error


def _class(name: str) -> type[nn.Module]:
    declare_operators()  # transformers imports torchvision where it is installed
    import transformers
    from transformers.models.auto import modeling_auto

    kind, model_type = name.split("/")
    named = getattr(modeling_auto, MAPPINGS[kind])[model_type]
    return getattr(transformers, named if isinstance(named, str) else named[0])


def _made(name: str, config: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(SEED)
    model = _class(name)(config).to(dtype).train()
    for module in model.modules():
        if hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")  # torch's grouped one knows no float64
    generator = torch.Generator().manual_seed(SEED)
    kind = name.split("/")[0]
    ids = torch.randint(3, VOCABULARY - 8, (BATCH, TOKENS), generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    if kind in ("causal", "masked", "seq2seq"):
        batch = {"input_ids": ids, "labels": ids.clone()}
        if name.startswith("causal/musicgen"):  # tokens of each codebook, here of one
            batch["labels"] = ids.unsqueeze(-1).clone()
        if name == "causal/git":  # text of an image
            size = (BATCH, *_image(config))
            batch["pixel_values"] = torch.randn(size, generator=generator, dtype=dtype)
        return model, batch
    if model.main_input_name == "input_ids":  # ImageGPT: clusters of colors
        return model, {"input_ids": ids, "labels": labels}
    shape = _image(config) if kind == "image" else _sound(model, config)
    values = torch.randn(BATCH, *shape, generator=generator, dtype=dtype)
    return model, {model.main_input_name: values, "labels": labels}


def _image(config: Any) -> tuple[int, ...]:
    size = getattr(config, "image_size", None) or 64
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        size = getattr(vision, "image_size", size)
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    if not hasattr(config, "patch_size"):  # of convolutions, which take any size
        high, wide = min(high, _WIDEST), min(wide, _WIDEST)
    return getattr(config, "num_channels", 3), high, wide


def _sound(model: nn.Module, config: Any) -> tuple[int, ...]:
    """Samples of sound, or a spectrogram where the model takes that."""
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        return (SAMPLES,)
    if hasattr(config, "max_source_positions"):
        return bins, 2 * config.max_source_positions
    return getattr(config, "max_length", math.ceil(SAMPLES / 160)), bins
