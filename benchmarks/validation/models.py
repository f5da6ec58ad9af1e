"""The models of published runs: Hugging Face classes on the meta device, and how Megatron-LM shards
their parameters.

A row has the sizes of a Llama, a Nemotron or a GPT. Of a mixture of experts it has the name, and
few sizes: the others are those that its makers published (`mixtures.MIXTURES`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.validation.mixtures import MIXTURES
from benchmarks.validation.nemotron import Nemotron
from benchmarks.validation.rows import Run
from graphaccel.capture.batch import Batch
from graphaccel.compiler.model import as_batch
from graphaccel.ir.program import Sharded
from graphaccel.planner.plan.module_pins import replicate
from graphaccel.planner.profile.profile import Profile

# How Megatron-LM shards over the tensor axis (arXiv 1909.08053, section 3): names of parameters by
# their end. A fused query, key and value weight is cut in three.
_SHARDED = {
    "embed_tokens.weight": Sharded("tensor", 0), "lm_head.weight": Sharded("tensor", 0),
    "q_proj.weight": Sharded("tensor", 0), "k_proj.weight": Sharded("tensor", 0),
    "v_proj.weight": Sharded("tensor", 0), "o_proj.weight": Sharded("tensor", 1),
    "gate_proj.weight": Sharded("tensor", 0), "up_proj.weight": Sharded("tensor", 0),
    "down_proj.weight": Sharded("tensor", 1),
    "wte.weight": Sharded("tensor", 0), "c_proj.weight": Sharded("tensor", 0),
    "c_attn.weight": Sharded("tensor", 1, 3), "c_attn.bias": Sharded("tensor", 0, 3),
    "c_fc.weight": Sharded("tensor", 1), "c_fc.bias": Sharded("tensor", 0),
    "in_proj.weight": Sharded("tensor", 0, 2), "states_proj.weight": Sharded("tensor", 0, 2),
    "step_proj.weight": Sharded("tensor", 0), "out_proj.weight": Sharded("tensor", 1),
    "embeddings.weight": Sharded("tensor", 0),
}  # fmt: skip
# Of experts: gate and up lie one behind the other.
_EXPERTS = {
    "experts.gate_up_proj": Sharded("tensor", 1, 2), "experts.up_proj": Sharded("tensor", 1),
    "experts.down_proj": Sharded("tensor", 2),
}  # fmt: skip


def placements(profile: Profile, tensor: int, expert: int) -> dict[str, Any]:
    """Where weights rest; on no other axis are they split."""
    found: dict[str, Any] = {}
    for parameter in profile.parameters:
        end = ".".join(parameter.name.split(".")[-2:])
        if end in _EXPERTS:
            own = (Sharded("expert", 0),) * (expert > 1) + (_EXPERTS[end],) * (tensor > 1)
            found[parameter.name] = own or replicate()
        elif end in _SHARDED:
            found[parameter.name] = _SHARDED[end] if tensor > 1 else replicate()
    return found


_PADDED = "sdpa with values padded"


def _padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """Fused attention of [batch, heads, tokens, width] whose values are narrower than its keys, as
    Hugging Face's flash attention has it: they are padded, and what comes of that is dropped."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    width = value.shape[-1]
    value = F.pad(value, [0, query.shape[-1] - width])
    made = sdpa_attention_forward(module, query, key, value, mask, **more)[0]
    return made[..., :width], None


def model_of(run: Run) -> tuple[nn.Module, Batch]:
    """A run's model without weights, and a batch of two sequences."""
    import transformers

    config: dict[str, Any] = {
        "vocab_size": run.vocabulary, "use_cache": False,
        "attn_implementation": "sdpa" if run.system.fused_attention else "eager",
    }  # fmt: skip
    if run.kind != "gpt":
        config |= {
            "hidden_size": run.hidden, "intermediate_size": run.ffn,
            "num_hidden_layers": run.layers, "num_attention_heads": run.heads,
            "num_key_value_heads": run.kv_heads, "max_position_embeddings": run.sequence,
        }  # fmt: skip
    else:
        config |= {
            "n_embd": run.hidden, "n_inner": run.ffn, "n_layer": run.layers, "n_head": run.heads,
            "n_positions": run.sequence, "resid_pdrop": run.system.dropout,
            "embd_pdrop": run.system.dropout,
            "attn_pdrop": 0.0 if run.system.fused_attention else run.system.dropout,
            "bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu_pytorch_tanh",
        }  # fmt: skip
    name = {"llama": "Llama", "nemotron": "Nemotron", "gpt": "GPT2"}.get(run.kind)
    if name is None:
        mixture = MIXTURES[run.kind]
        name, config = mixture.family, {**config, **mixture.more}
        if "hybrid_override_pattern" in config:
            config["hybrid_override_pattern"] = config["hybrid_override_pattern"][: run.layers]
        if "kv_lora_rank" in config:
            from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

            transformers.AttentionInterface.register(_PADDED, _padded)
            AttentionMaskInterface.register(_PADDED, sdpa_mask)
            config["attn_implementation"] = _PADDED
    head = "LMHeadModel" if run.kind == "gpt" else "ForCausalLM"
    with torch.device("meta"):
        known = getattr(transformers, name + "Config")(**config)
        if name == "NemotronH":
            module: nn.Module = Nemotron(known, MIXTURES[run.kind].ahead)
        else:
            module = getattr(transformers, name + head)(known)
        tokens = torch.zeros(2, run.sequence, dtype=torch.int64)
    module = module.train().to(getattr(torch, run.precision))
    return module, as_batch({"input_ids": tokens, "labels": tokens})
