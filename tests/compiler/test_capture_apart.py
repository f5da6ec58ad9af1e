"""Batches with as many examples as positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from graphaccel.capture.batch import flatten_call
from graphaccel.capture.symbols import BATCH, SEQUENCE
from graphaccel.compiler.captures import Captures
from graphaccel.compiler.model import model_of
from graphaccel.ir.replication.unfold import input_nodes


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize(("examples", "positions"), [(192, 192), (96, 192), (190, 192)])
def test_examples_and_positions_are_two_symbols_where_they_are_as_many(
    examples: int, positions: int
) -> None:
    """Masks of this size are not computed in full, and attention is causal at every size."""
    with torch.device("meta"):
        tokens = torch.zeros(examples, positions, dtype=torch.int64)
    batch = flatten_call((), {"input_ids": tokens, "labels": tokens})
    step, sizes = Captures(model_of(llama(), None, None, "cpu")).of(batch)
    assert sizes == {BATCH: examples, SEQUENCE: positions}
    attention = [n for n in step.graph.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert len(attention) == 2
    assert all(True in node.args for node in attention)


class Fixed(nn.Module):
    """Takes 64 examples and no other number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[0] != 64:
            raise ValueError(f"{tokens.shape[0]} examples")
        return self.table(tokens).square().sum()


def test_a_model_of_one_batch_size_is_captured_at_it() -> None:
    tokens = torch.zeros(64, 64, dtype=torch.int64)
    step, sizes = Captures(model_of(Fixed(), None, None, "cpu")).of(flatten_call((tokens,), {}))
    assert BATCH not in sizes
    pairs = zip(input_nodes(step.graph), step.inputs, strict=True)
    assert [n.meta["val"].shape for n, spec in pairs if spec.kind == "batch"] == [(64, 64)]
