"""Collators: what they pad and pack, and that packed rows have the loss of separate examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import graphaccel
from graphaccel import errors
from graphaccel.data.collate import IGNORED, PackingCollator, PaddingCollator


def test_padded_to_the_least_length_that_holds_all() -> None:
    collate = PaddingCollator(lengths=[8, 4, 16], padding=9)
    batch = collate([[1, 2, 3, 4, 5], {"input_ids": [6, 7], "labels": [IGNORED, 7]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9], [6, 7, *[9] * 6]]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] * 2 + [0] * 6]
    assert batch["labels"].tolist() == [
        [1, 2, 3, 4, 5, *[IGNORED] * 3],
        [IGNORED, 7, *[IGNORED] * 6],
    ]
    assert collate([[1, 2]])["input_ids"].shape == (1, 4)


def test_packed_the_longest_first() -> None:
    collate = PackingCollator(length=6, rows=3, padding=9)
    batch = collate([[1, 2], [3, 4, 5, 6], [7, 8, 9]])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6, 1, 2], [7, 8, 9, 9, 9, 9], [9] * 6]
    ignored = [IGNORED] * 6
    assert batch["labels"].tolist() == [
        [IGNORED, 4, 5, 6, IGNORED, 2],
        [IGNORED, 8, 9, *ignored[3:]],
        ignored,
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0], [0] * 6]
    mask = batch["attention_mask"][:, 0]
    assert mask.shape == (3, 6, 6)
    assert mask[0, 4:, :4].sum() == 0
    assert mask[0].tril().equal(mask[0])
    assert mask.any(-1).all()  # a row without any key would be NaN
    both = PackingCollator(length=6, rows=3, causal=False)([[1, 2], [3, 4, 5, 6]])
    assert both["attention_mask"][0, 0, :4, :4].all()


@pytest.mark.parametrize(
    ("collate", "examples", "text"),
    [
        (PaddingCollator([4, 8]), [[1] * 9], "PaddingCollator(lengths=[4, 8, 9])"),
        (PackingCollator(4, 1), [[1] * 3, [2] * 2], "PackingCollator(length=4, rows=2)"),
        (PackingCollator(4, 1), [[1] * 5], "PackingCollator(length=5, rows=1)"),
        (PaddingCollator([4]), [{"input_ids": [1], "labels": [1, 2]}], '"labels": [5, 3, 8]'),
        (PaddingCollator([4]), [[]], "shape [0]"),
    ],
)
def test_what_does_not_fit(collate: Any, examples: Any, text: str) -> None:
    with pytest.raises(errors.BadData, match="GA417") as caught:
        collate(examples)
    assert text in str(caught.value)


def test_packed_rows_have_the_loss_of_separate_examples() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    lengths = (9, 5, 4, 7)
    examples = [torch.randint(50, (n,)).tolist() for n in lengths]
    batch = PackingCollator(length=16, rows=2)(examples)
    losses = [
        F.cross_entropy(model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]))
        for ids in examples
    ]
    counts = torch.tensor([n - 1 for n in lengths])
    expected = (torch.stack(losses) * counts).sum() / counts.sum()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphaccel.optimize(model, optimizer, devices=1, microbatches=2)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
