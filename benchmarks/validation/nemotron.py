"""Nemotron 3: state space layers, attention and experts of a narrower width in one stack.

Hugging Face's classes, with state space layers as kernels train them (`state_space`), and with the
layers that predict tokens further on, which those classes leave out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.validation.state_space import Mixer

_AHEAD = ("full_attention", "moe")  # what such a layer has: `mtp_hybrid_override_pattern`, "*E"
_AHEAD_SHARE = 0.1  # of the loss, for all of them: `mtp_loss_scaling_factor`


class Nemotron(nn.Module):
    """Hugging Face's `NemotronHForCausalLM` of a configuration, and so many layers that predict
    each one token more (arXiv 2412.19437, section 2.2): of what is before them and of the word that
    was to be predicted."""

    def __init__(self, config: Any, ahead: int) -> None:
        from transformers import NemotronHForCausalLM
        from transformers.models.nemotron_h.modeling_nemotron_h import (
            NemotronHBlock,
            NemotronHRMSNorm,
        )

        super().__init__()
        self.base = NemotronHForCausalLM(config)
        for block in self.base.model.layers:
            if block.block_type == "linear_attention":
                block.mixer = Mixer(
                    config.hidden_size, config.n_groups, config.mamba_num_heads,
                    config.mamba_head_dim, config.ssm_state_size,
                )  # fmt: skip
        at = [config.layers_block_type.index(kind) for kind in _AHEAD]

        def norm() -> nn.Module:
            return NemotronHRMSNorm(config.hidden_size, config.layer_norm_epsilon)

        self.words = nn.ModuleList([norm() for _ in range(ahead)])
        self.before = nn.ModuleList([norm() for _ in range(ahead)])
        self.joined = nn.ModuleList(
            [nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
             for _ in range(ahead)]
        )  # fmt: skip
        self.ahead = nn.ModuleList(
            [nn.Sequential(*(NemotronHBlock(config, i) for i in at)) for _ in range(ahead)]
        )
        self.behind = nn.ModuleList([norm() for _ in range(ahead)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.base.model(input_ids=input_ids)[0]
        loss = self._loss(hidden, labels)
        layers = zip(self.words, self.before, self.joined, self.ahead, self.behind, strict=True)
        for words, before, joined, ahead, behind in layers:
            input_ids, labels = (F.pad(t[:, 1:], [0, 1]) for t in (input_ids, labels))
            word = words(self.base.model.embeddings(input_ids))
            hidden = behind(ahead(joined(torch.cat([word, before(hidden)], -1))))
            loss = loss + _AHEAD_SHARE / len(self.ahead) * self._loss(hidden, labels)
        return loss

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        made = self.base.lm_head(hidden).float()
        return self.base.loss_function(made, labels, self.base.vocab_size)
