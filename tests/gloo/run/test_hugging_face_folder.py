"""A Hugging Face folder, trained under a plan and exported, is read by transformers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphaccel
from tests.support.captures import captures_of
from tests.support.pool import Pool

pytestmark = pytest.mark.multiprocess
pytest.importorskip("transformers")

PLANS: list[dict[str, Any]] = [
    {"pipeline": 2, "microbatches": 2},
    {"tensor": 2},
    {"data": 2, "zero": 3},
]
STEPS = 20


def _ids(seed: int) -> torch.Tensor:
    return torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(seed))


def _config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


@captures_of("Hugging Face folder")
def _trained(folder: str) -> list[torch.Tensor]:
    """The logits of each plan's model after its steps."""
    from transformers import GPT2LMHeadModel

    logits = []
    for number, pins in enumerate(PLANS):
        model: Any = GPT2LMHeadModel.from_pretrained(f"{folder}/first", dtype=torch.float64)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        graphaccel.optimize(model, optimizer, devices=2, check="off", **pins)
        for step in range(STEPS):
            ids = _ids(step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        graphaccel.export(f"{folder}/{number}", model, max_shard_bytes=20_000)
        model.eval()
        with torch.no_grad():
            logits.append(model(input_ids=_ids(99)).logits.clone())
    return logits


def test_logits_of_the_exported_folder(pool: Pool, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(_config()).save_pretrained(tmp_path / "first")
    ranks = pool.run(2, _trained, str(tmp_path))
    for number in range(len(PLANS)):
        read = GPT2LMHeadModel.from_pretrained(tmp_path / str(number), dtype=torch.float64).eval()
        assert len(list((tmp_path / str(number)).glob("*.safetensors"))) > 1
        with torch.no_grad():
            expected = read(input_ids=_ids(99)).logits
        for logits in ranks:
            torch.testing.assert_close(logits[number], expected, rtol=1e-12, atol=1e-12)
