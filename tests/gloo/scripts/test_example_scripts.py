"""pytorch/examples' imagenet, word_language_model (Transformer) and vae in miniature: equal to
plain PyTorch in float64 on one process and on two that split the batch."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import graphaccel
from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, weights

pytestmark = pytest.mark.multiprocess


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(planes), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1:
            shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1, self.layer2 = BasicBlock(4, 4), BasicBlock(4, 8, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, val: float, n: int = 1) -> None:
        self.sum += val * n
        self.count += n

    @property
    def avg(self) -> Tensor:
        return torch.tensor(self.sum / self.count)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0).item() / len(target) for k in topk]


def _epoch(loader: Any, model: nn.Module, criterion: Any, optimizer: Any) -> Iterator[Tensor]:
    """One epoch of training, or with optimizer=None of validation."""
    losses, top1, top2 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for images, target in loader:
            output = model(images)
            loss = criterion(output, target)
            acc1, acc2 = accuracy(output, target, topk=(1, 2))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1, images.size(0))
            top2.update(acc2, images.size(0))
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    yield from (losses.avg, top1.avg, top2.avg)


def imagenet(wrap: Wrap) -> Iterator[Tensor]:
    """Two epochs; then the last checkpoint is resumed by a new model for a third."""
    data = TensorDataset(torch.randn(12, 3, 8, 8).double(), torch.randint(0, 5, (12,)))
    checkpoint: bytes | None = None
    for epochs in (range(2), range(2, 3)):
        model = ResNet().double()
        criterion = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        model, optimizer = wrap(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if checkpoint is not None:
            state = torch.load(io.BytesIO(checkpoint), weights_only=True)
            model.load_state_dict(state["state_dict"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
        train_loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=0)
        val_loader = DataLoader(data, batch_size=4, shuffle=False, num_workers=0)
        for epoch in epochs:
            yield from _epoch(train_loader, model, criterion, optimizer)
            yield from _epoch(val_loader, model, criterion, None)
            scheduler.step()
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            file = io.BytesIO()
            torch.save(state, file)
            checkpoint = file.getvalue()
    yield from weights(model)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 10) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=0.0)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[: x.size(0), :])


class TransformerModel(nn.Transformer):
    """Tokens (time, batch); the causal mask is kept on the model until the length changes."""

    def __init__(self, ntoken: int, ninp: int) -> None:
        super().__init__(
            d_model=ninp, nhead=2, dim_feedforward=16, num_encoder_layers=2, dropout=0.0
        )
        self.src_mask: Tensor | None = None
        self.pos_encoder = PositionalEncoding(ninp)
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.ninp = ninp
        self.decoder = nn.Linear(ninp, ntoken)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def _generate_square_subsequent_mask(self, sz: int) -> Tensor:
        return torch.log(torch.tril(torch.ones(sz, sz)))

    def forward(self, src: Tensor, has_mask: bool = True) -> Tensor:
        if has_mask:
            device = src.device
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = self._generate_square_subsequent_mask(len(src)).to(device)
        else:
            self.src_mask = None
        src = self.input_emb(src) * math.sqrt(self.ninp)
        src = self.pos_encoder(src)
        output = self.encoder(src, mask=self.src_mask)
        return F.log_softmax(self.decoder(output), dim=-1)


def word_transformer(wrap: Wrap) -> Iterator[Tensor]:
    """`bptt` slices of columns of text, the last one shorter; SGD written out, the rate halved."""
    bptt, ntokens, lr = 4, 11, 2.0
    corpus = torch.randint(0, ntokens, (4 * 15,)).view(4, -1).t().contiguous()
    model = wrap(TransformerModel(ntokens, 8).double())
    criterion = nn.NLLLoss()

    def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
        seq_len = min(bptt, len(source) - 1 - i)
        return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)

    def evaluate() -> Tensor:
        model.eval()
        total_loss = 0.0
        with torch.no_grad():
            for i in range(0, corpus.size(0) - 1, bptt):
                data, targets = get_batch(corpus, i)
                output = model(data).view(-1, ntokens)
                total_loss += len(data) * criterion(output, targets).item()
        return torch.tensor(total_loss / (len(corpus) - 1))

    for _ in range(2):
        model.train()
        for i in range(0, corpus.size(0) - 1, bptt):
            data, targets = get_batch(corpus, i)
            model.zero_grad()
            output = model(data)
            output = output.view(-1, ntokens)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-lr)
            yield loss
        yield evaluate()
        lr /= 2.0
    yield from weights(model)


class Vae(nn.Module):
    """Encode, draw, decode. It returns what it drew; `noise` gives the draw instead."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.fc3, self.fc4 = nn.Linear(3, 8), nn.Linear(8, 12)

    def reparameterize(self, mu: Tensor, logvar: Tensor, noise: Tensor | None) -> Any:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std) if noise is None else noise
        return mu + eps * std, eps

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        hidden = F.relu(self.fc1(x.view(-1, 12)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z, eps = self.reparameterize(mu, logvar, noise)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar, eps


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 12), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def _vae(model: Any, optimizer: Any, given: list[Tensor] | None) -> tuple[list[Tensor], Any]:
    """Losses and final weights of three steps, and what was drawn in them."""
    results, drawn = [], []
    for step in range(3):
        data = torch.rand(64, 1, 3, 4, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        noise = () if given is None else (given[step],)
        recon_batch, mu, logvar, eps = model(data, *noise)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
        drawn.append(eps.detach())
    return [*results, *weights(model)], drawn


def _vae_on_two() -> tuple[float, Tensor]:
    """The largest difference from plain PyTorch that is given the same draws; the draws."""
    torch.manual_seed(0)
    model, reference = Vae().double(), Vae().double()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = graphaccel.optimize(model, optimizer, data=2)
    ours, drawn = _vae(model, optimizer, None)
    plain, _ = _vae(reference, torch.optim.Adam(reference.parameters(), lr=1e-3), drawn)
    pairs = list(zip(ours, plain, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs), torch.stack(drawn)


def test_draws_of_a_vae_on_two_processes(pool: Pool) -> None:
    """Each process draws for its half of the batch, so the draws are others than on one: with the
    same draws plain PyTorch has the same losses and weights, and they are independent normal."""
    (first, drawn), (second, others) = pool.run(2, _vae_on_two)
    assert max(first, second) < 1e-11
    assert torch.equal(drawn, others)
    values = drawn.flatten()
    assert len(values.unique()) == len(values) == 3 * 64 * 3
    assert abs(values.mean()) < 4 / math.sqrt(len(values))
    assert abs(values.std() - 1) < 4 / math.sqrt(2 * len(values))


SCRIPTS = {"imagenet": imagenet, "word_transformer": word_transformer}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_process(name: str) -> None:
    assert furthest(SCRIPTS[name], {"devices": 1}) < 1e-12


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_processes(pool: Pool, name: str) -> None:
    assert max(pool.run(2, furthest, SCRIPTS[name], {"data": 2})) < 1e-12
