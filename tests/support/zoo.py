"""Ten small models, one per family, that every multi-device plan is compared on.

Random weights from a fixed seed, training mode, dropout 0, batch 8. Where the loss is over tokens,
the rows hold different numbers of ignored labels (-100), so that averaging the means of
microbatches or ranks gives a wrong answer. Four blocks or more: a pipeline of 4 is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.support.casts import lift_loss_cast
from tests.support.gpt import GPT

__all__ = ["ALL", "EXPERTS", "ZOO", "Entry", "call", "double", "lift_loss_cast", "loss_of"]

Batch = dict[str, Tensor] | tuple[Tensor, ...]
LossFn = Callable[[Any, Batch], Tensor]

SEED = 20
BATCH = 8
TOKENS = 16
VOCABULARY = 96
PADDING = 0
# Of the initial weights: about 1 / sqrt(width). With the usual 0.02 models this narrow attend
# almost evenly, and the gradients of queries and keys are so small that they are mostly rounding.
DEVIATION = 0.15


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    `build()` makes the model and its batch anew, the same bits every time; `loss_fn(output, batch)`
    is None where the model computes its own loss. `mixes_rows`: the loss is not a sum over rows
    (batch statistics), so a split of the batch changes the mathematics. `upcasts`: the model casts
    to float32 inside, so float64 results are only good to 1e-7 without `lift_loss_cast`.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Batch, LossFn | None]]
    notes: str
    mixes_rows: bool = False
    upcasts: bool = False


def call(model: nn.Module, batch: Batch) -> Any:
    """`model(**batch)` for a dict, `model(*batch)` for a tuple."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def loss_of(output: Any, batch: Batch, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar loss: `loss_fn(output, batch)`, `output` itself if a tensor, or `output.loss`."""
    if loss_fn is not None:
        return loss_fn(output, batch)
    return output if isinstance(output, Tensor) else output.loss


def double(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """The same in float64: the model in place, the batch as a copy (integers stay)."""

    def widen(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    if isinstance(batch, dict):
        return model.double(), {name: widen(value) for name, value in batch.items()}
    return model.double(), tuple(widen(value) for value in batch)


def _generator(seed: int = SEED) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(generator: torch.Generator, length: int = TOKENS) -> Tensor:
    """int64 [8, length] of token numbers 3..95; 0 to 2 are left for padding, start and end."""
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _lengths(length: int = TOKENS) -> Tensor:
    """bool [8, length]: True on the first tokens of each row, a different number in each."""
    used = torch.tensor([16, 3, 9, 14, 2, 11, 6, 8]) * length // 16
    return torch.arange(length)[None, :] < used[:, None]


def _labels(generator: torch.Generator, length: int = TOKENS) -> Tensor:
    return _tokens(generator, length).masked_fill(~_lengths(length), -100)


def _causal_batch() -> dict[str, Tensor]:
    ids = _tokens(_generator())
    return {"input_ids": ids, "labels": ids.masked_fill(~_lengths(), -100)}


def _class_batch(name: str, shape: tuple[int, ...], seed: int = SEED) -> dict[str, Tensor]:
    """A float32 input of `shape` after the batch dim, and one of 5 classes per row."""
    generator = _generator(seed)
    return {
        name: torch.randn((BATCH, *shape), generator=generator),
        "labels": torch.randint(0, 5, (BATCH,), generator=generator),
    }


def _randomise_biases(model: nn.Module) -> None:
    """Biases start at exactly 0, which hides a bias that is lost or added twice."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.02)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    """`make()` under the fixed seed, the caller's random state untouched; in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make().train()
        _randomise_biases(model)
    return model


def _gpt() -> tuple[nn.Module, Batch, None]:
    generator = _generator()
    ids = _tokens(generator)
    return (
        _made(lambda: GPT(VOCABULARY, deviation=DEVIATION)),
        {"input_ids": ids, "labels": _labels(generator)},
        None,
    )


def _gpt2() -> tuple[nn.Module, Batch, None]:
    config = transformers.GPT2Config(
        initializer_range=DEVIATION,
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _made(lambda: transformers.GPT2LMHeadModel(config)), _causal_batch(), None


def _bert() -> tuple[nn.Module, Batch, None]:
    config = transformers.BertConfig(
        initializer_range=DEVIATION,
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=PADDING,
    )  # fmt: skip
    generator = _generator()
    used = _lengths()
    batch: Batch = {
        "input_ids": _tokens(generator).masked_fill(~used, PADDING),
        "attention_mask": used.long(),
        "labels": torch.randint(0, 5, (BATCH,), generator=generator),
    }
    return _made(lambda: transformers.BertForSequenceClassification(config)), batch, None


def _sequence_to_sequence_batch() -> dict[str, Tensor]:
    """Padded sources of different lengths, shorter targets with different numbers of -100."""
    generator = _generator()
    used = _lengths()
    return {
        "input_ids": _tokens(generator).masked_fill(~used, PADDING),
        "attention_mask": used.long(),
        "labels": _labels(generator, 12),
    }


def _t5() -> tuple[nn.Module, Batch, None]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=3,
        num_heads=4, dropout_rate=0.0, tie_word_embeddings=True, use_cache=False,
        pad_token_id=PADDING, eos_token_id=2, decoder_start_token_id=PADDING,
    )  # fmt: skip
    model = _made(lambda: transformers.T5ForConditionalGeneration(config))
    return model, _sequence_to_sequence_batch(), None


def _bart() -> tuple[nn.Module, Batch, None]:
    config = transformers.BartConfig(
        init_std=DEVIATION,
        vocab_size=VOCABULARY, d_model=32, max_position_embeddings=32,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, use_cache=False, pad_token_id=PADDING, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    model = _made(lambda: transformers.BartForConditionalGeneration(config))
    return model, _sequence_to_sequence_batch(), None


def _vit() -> tuple[nn.Module, Batch, None]:
    config = transformers.ViTConfig(
        initializer_range=DEVIATION,
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = _made(lambda: transformers.ViTForImageClassification(config))
    return model, _class_batch("pixel_values", (3, 16, 16)), None


def _swin() -> tuple[nn.Module, Batch, None]:
    config = transformers.SwinConfig(
        initializer_range=DEVIATION,
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        mlp_ratio=2.0, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )  # fmt: skip
    model = _made(lambda: transformers.SwinForImageClassification(config))
    return model, _class_batch("pixel_values", (3, 32, 32)), None


def _llama() -> tuple[nn.Module, Batch, None]:
    config = transformers.LlamaConfig(
        initializer_range=DEVIATION,
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        attention_dropout=0.0, use_cache=False, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _made(lambda: transformers.LlamaForCausalLM(config)), _causal_batch(), None


def _gpt_oss() -> tuple[nn.Module, Batch, None]:
    config = transformers.GptOssConfig(
        initializer_range=DEVIATION,
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
        num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.0, use_cache=False,
        tie_word_embeddings=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return _made(lambda: transformers.GptOssForCausalLM(config)), _causal_batch(), None


def _mixtral() -> tuple[nn.Module, Batch, None]:
    config = transformers.MixtralConfig(
        initializer_range=DEVIATION,
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.0, use_cache=False,
        tie_word_embeddings=False, pad_token_id=None, bos_token_id=1, eos_token_id=2,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return _made(lambda: transformers.MixtralForCausalLM(config)), _causal_batch(), None


def _resnet() -> tuple[nn.Module, Batch, None]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
        num_labels=5,
    )  # fmt: skip
    model = _made(lambda: transformers.ResNetForImageClassification(config))
    # With SEED, rounding decides at one of the ReLUs: eager itself then leaves its float32 curve by
    # 2.4e-5 for some orders of the rows (`python -m benchmarks.parity --noise 24`).
    return model, _class_batch("pixel_values", (3, 64, 64), seed=1), None


def _wav2vec2() -> tuple[nn.Module, Batch, None]:
    """Sequence classification: `torch.export` refuses the losses of the CTC and pretraining heads.

    Both branch on a tensor's value (is a label larger than the vocabulary; does a negative sample
    equal its positive). `masked_spec_embed` requires a gradient and never gets one, in eager too:
    it is the zoo's unused parameter.
    """
    config = transformers.Wav2Vec2Config(
        initializer_range=DEVIATION,
        vocab_size=32, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, classifier_proj_size=32,
        num_labels=5, pad_token_id=PADDING, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = _made(lambda: transformers.Wav2Vec2ForSequenceClassification(config))
    return model, _class_batch("input_values", (320,)), None


_ENTRIES = (
    Entry("gpt", _gpt, "own plain GPT; tied embeddings; returns the loss itself"),
    Entry("gpt2", _gpt2, "causal; tied embeddings; Conv1D with fused q, k, v", upcasts=True),
    Entry("bert", _bert, "classification with padding mask"),
    Entry(
        "t5",
        _t5,
        "encoder-decoder; tied embeddings; relative position bias shared by layers",
        upcasts=True,
    ),
    Entry("bart", _bart, "encoder-decoder; tied embeddings; post-norm"),
    Entry("vit", _vit, "images; class token"),
    Entry("swin", _swin, "images; shifted windows; patch merging"),
    Entry(
        "llama",
        _llama,
        "causal; 4 query heads on 2 key heads; rotary positions; RMS norm",
        upcasts=True,
    ),
    Entry("resnet", _resnet, "convolutions; BatchNorm statistics over the batch", mixes_rows=True),
    Entry("wav2vec2", _wav2vec2, "audio; sequence classification"),
)

ZOO: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
# Of use where experts are sharded; every other plan treats them as it treats llama.
EXPERTS: Mapping[str, Entry] = MappingProxyType(
    {
        "mixtral": Entry("mixtral", _mixtral, "routed experts, all in one tensor", upcasts=True),
        "gpt_oss": Entry(
            "gpt_oss", _gpt_oss, "experts with biases; every second column a gate", upcasts=True
        ),
    }
)
ALL: Mapping[str, Entry] = MappingProxyType({**ZOO, **EXPERTS})
