"""Mixtures of experts that published runs name, by what their makers published of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Mixture:
    """family: of Hugging Face's classes. ffn: width of layers without experts, or of the experts
    where there is no other. more: of its configuration. assumed: what the classes do otherwise.
    ahead: layers that predict tokens further on."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    more: Mapping[str, object] = field(hash=False)
    assumed: tuple[str, ...] = ()
    ahead: int = 0

    @property
    def rows(self) -> int:
        """Numbers in a row that experts are sent."""
        return int(str(self.more.get("moe_latent_size", self.hidden)))

    @property
    def chosen(self) -> int:
        """Experts that a token goes to."""
        return int(str(self.more["num_experts_per_tok"]))

    @property
    def experts(self) -> int:
        """Of a layer, without those that all tokens go to."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return next(int(str(self.more[name])) for name in names if name in self.more)

    @property
    def of_an_expert(self) -> int:
        """Numbers that an expert has: of a product there and one back, and of a gate's, which
        `NemotronHExperts` do not have."""
        width = int(str(self.more.get("moe_intermediate_size", self.ffn)))
        return (2 if self.family == "NemotronH" else 3) * width * self.rows

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has them."""
        pattern = str(self.more.get("hybrid_override_pattern", ""))
        if pattern:
            return pattern[layer] == "E"
        return layer >= int(str(self.more.get("first_k_dense_replace", 0)))


def _latent(
    layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, **more: object
) -> Mixture:
    """Multi-head latent attention with the widths of DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    Groups of experts limit where a token may go, and nothing of what is computed."""
    usual: dict[str, object] = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    }  # fmt: skip
    return Mixture("DeepseekV3", layers, hidden, heads, heads, ffn, vocabulary, {**usual, **more})


def _v3(layers: int, dense: int) -> Mixture:
    return _latent(
        layers, 7168, 128, 18432, 129280, first_k_dense_replace=dense,
        moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8,
    )  # fmt: skip


MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        # xai-org/grok-1, README.
        "Grok-1": Mixture(
            "Mixtral", 64, 6144, 48, 8, 32768, 131072,
            {"num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        # arXiv 2508.10925, section 2, and openai/gpt-oss-120b, config.json.
        "GPT OSS 120B": Mixture(
            "Mixtral", 36, 2880, 64, 8, 2880, 201088,
            {"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4},
            ("no biases, no sinks, and every layer attends to all tokens",),
        ),
        # arXiv 2505.09388, table 2, and Qwen/Qwen3-235B-A22B, config.json.
        "Qwen3_235B_a22B": Mixture(
            "Qwen3Moe", 94, 4096, 64, 4, 12288, 151936,
            {"head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 128,
             "num_experts_per_tok": 8, "norm_topk_prob": True},
        ),
        # There, and Qwen/Qwen3-30B-A3B, config.json.
        "Qwen3_30B_a3B": Mixture(
            "Qwen3Moe", 48, 2048, 32, 4, 6144, 151936,
            {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
             "num_experts_per_tok": 8, "norm_topk_prob": True},
        ),
        # arXiv 2412.19437, section 4.2.
        "DeepSeekV3 (w/o MTP)": _v3(61, 3),
        "DeepSeekV3": replace(
            _v3(61, 3), assumed=("no layer that predicts a token further on, of 62",)
        ),
        # MooreThreads/SimuMax: configs/models, of which its runs on B200 have one dense layer.
        "deepseekv3": _v3(4, 1),
        "deepseekv2": _latent(
            4, 5120, 128, 12288, 102400, first_k_dense_replace=1,
            moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=2,
            num_experts_per_tok=6,
        ),
        # arXiv 2507.20534, section 2.3, and moonshotai/Kimi-K2-Base, config.json.
        "Kimi_K2": _latent(
            61, 7168, 64, 18432, 163840, first_k_dense_replace=1,
            moe_intermediate_size=2048, n_routed_experts=384, n_shared_experts=1,
            num_experts_per_tok=8,
        ),
        # NVIDIA-NeMo/Megatron-Bridge@v0.4.0, nemotron_h_provider.py, `Nemotron3NanoProvider`.
        "Nemotron_3_Nano": Mixture(
            "NemotronH", 52, 2688, 32, 2, 1856, 131072,
            {"head_dim": 128, "hybrid_override_pattern":
                "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
             "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
             "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
             "moe_shared_expert_intermediate_size": 3712, "rescale_prenorm_residual": False},
        ),
        # There, `Nemotron3SuperProvider`.
        "Nemotron_3_Super": Mixture(
            "NemotronH", 88, 4096, 32, 2, 2688, 131072,
            {"head_dim": 128, "hybrid_override_pattern":
                "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM"
                "*EMEMEMEME",
             "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
             "n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688,
             "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376,
             "rescale_prenorm_residual": False},
            ahead=2,
        ),
    }
)  # fmt: skip


def mixture_of(name: str) -> str | None:
    """The entry of a model by the name that a row has."""
    return next((known for known in MIXTURES if name.startswith(known)), None)
