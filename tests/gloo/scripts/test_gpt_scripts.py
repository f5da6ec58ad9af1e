"""minGPT's and nanoGPT's training loops in miniature: equal to plain PyTorch in float64 on one
process, on two that split the batch, and on two pipeline stages."""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, weights

pytestmark = pytest.mark.multiprocess

VOCABULARY, BLOCK, WIDTH, HEADS = 11, 8, 12, 2
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero": {"data": 2, "zero": 3},
    "pipeline": {"pipeline": 2, "microbatches": 2},
}


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class CausalSelfAttention(nn.Module):
    """The mask is a buffer of the block size; queries, keys and values come of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        mask = torch.tril(torch.ones(BLOCK, BLOCK)).view(1, 1, BLOCK, BLOCK)
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    """Its second half is a function over a dict of submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=nn.Linear(WIDTH, 4 * WIDTH),
                c_proj=nn.Linear(4 * WIDTH, WIDTH),
                act=NewGELU(),
                dropout=nn.Dropout(0.0),
            )
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class GPT(nn.Module):
    """tied: the head has the weights of the token embedding, as in nanoGPT."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(BLOCK, WIDTH),
                drop=nn.Dropout(0.0),
                h=nn.ModuleList([Block() for _ in range(2)]),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def configure_optimizers(self, **options: Any) -> torch.optim.Optimizer:
        params = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), **options)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= BLOCK, f"Cannot forward sequence of length {t}, block size is only {BLOCK}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            flat = logits.view(-1, logits.size(-1))
            loss = F.cross_entropy(flat, targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            idx_cond = idx if idx.size(1) <= BLOCK else idx[:, -BLOCK:]
            logits, _ = self(idx_cond)
            probs = F.softmax(logits[:, -1, :] / 0.8, dim=-1)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx


class SortDataset(Dataset):
    """minGPT's demo: sort digits; the inputs' positions are not predicted (-1)."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inp = torch.randint(5, size=(4,), dtype=torch.long)
        cat = torch.cat((inp, torch.sort(inp)[0]), dim=0)
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[:3] = -1
        return x, y


class Trainer:
    """minGPT's: an endless loader, callbacks by name, and clipping before each step."""

    def __init__(self, config: Any, model: nn.Module, train_dataset: Dataset, wrap: Wrap) -> None:
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.optimizer: Any = None
        self.wrap = wrap
        self.callbacks: Any = defaultdict(list)
        self.iter_num, self.iter_time, self.iter_dt = 0, 0.0, 0.0

    def add_callback(self, onevent: str, callback: Callable[[Trainer], None]) -> None:
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent: str) -> None:
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self) -> None:
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers()
        model, self.optimizer = self.wrap(model, self.optimizer)
        loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )
        model.train()
        self.iter_num, self.iter_time = 0, time.time()
        data_iter = iter(loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(loader)
                batch = next(data_iter)
            x, y = [t.to(config.device) for t in batch]
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            now = time.time()
            self.iter_dt, self.iter_time = now - self.iter_time, now
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def mingpt(wrap: Wrap) -> Iterator[Tensor]:
    """Trains by callbacks, and samples from the model in one of them."""
    config = SimpleNamespace(
        batch_size=4, num_workers=0, device="cpu", grad_norm_clip=0.5, max_iters=4
    )
    model = GPT(tied=False).double()
    trainer = Trainer(config, model, SortDataset(), wrap)
    losses: list[Tensor] = []
    trainer.add_callback("on_batch_end", lambda trainer: losses.append(trainer.loss.detach()))
    samples: list[Tensor] = []

    def batch_end_callback(trainer: Trainer) -> None:
        if trainer.iter_num == 2:
            trainer.model.eval()
            samples.append(trainer.model.generate(torch.tensor([[4, 1, 3, 0], [2, 2, 1, 4]]), 2))
            trainer.model.train()

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    yield from (*losses, *samples)
    yield from weights(trainer.model)


def nanogpt(wrap: Wrap) -> Iterator[Tensor]:
    """A memory-mapped file, a schedule by hand, evaluation, accumulation, clipping."""
    torch.manual_seed(1337)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for split, size in (("train", 200), ("val", 50)):
            tokens = torch.randint(0, VOCABULARY, (size,)).numpy().astype(np.uint16)
            tokens.tofile(folder / f"{split}.bin")
        yield from _train(wrap, folder)


def _train(wrap: Wrap, folder: Path) -> Iterator[Tensor]:
    gradient_accumulation_steps, eval_iters, grad_clip, max_iters = 2, 2, 1.0, 3
    batch_size, ddp, device_type = 4, False, "cpu"

    def get_batch(split: str) -> tuple[Tensor, Tensor]:
        data = np.memmap(folder / f"{split}.bin", dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - BLOCK, (batch_size,))
        rows = [torch.from_numpy((data[i : i + BLOCK]).astype(np.int64)) for i in ix]
        nexts = [torch.from_numpy((data[i + 1 : i + 1 + BLOCK]).astype(np.int64)) for i in ix]
        return torch.stack(rows), torch.stack(nexts)

    model = GPT(tied=True).double()
    scaler = torch.amp.GradScaler(device_type, enabled=False)
    optimizer = model.configure_optimizers(fused=False)
    model, optimizer = wrap(model, optimizer)
    if ddp:
        model = nn.parallel.DistributedDataParallel(model)

    @torch.no_grad()
    def estimate_loss() -> dict[str, Tensor]:
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                _, loss = model(*get_batch(split))
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it: int) -> float:
        coeff = 0.5 * (1.0 + math.cos(math.pi * it / max_iters))
        return 1e-3 + coeff * 2e-3

    X, Y = get_batch("train")
    raw_model = model.module if ddp else model
    for iter_num in range(max_iters):
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % 2 == 0:
            yield from estimate_loss().values()
        for micro_step in range(gradient_accumulation_steps):
            if ddp:
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
            _, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        yield torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield torch.tensor(loss.item() * gradient_accumulation_steps)
    yield from weights(raw_model)


SCRIPTS = {"mingpt": mingpt, "nanogpt": nanogpt}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_process(name: str) -> None:
    assert furthest(SCRIPTS[name], {"devices": 1}) < 1e-12


@pytest.mark.parametrize(
    ("name", "plan"),
    [("mingpt", "data"), ("mingpt", "pipeline"), ("nanogpt", "zero"), ("nanogpt", "pipeline")],
)
def test_two_processes(pool: Pool, name: str, plan: str) -> None:
    assert max(pool.run(2, furthest, SCRIPTS[name], PLANS[plan])) < 1e-12
