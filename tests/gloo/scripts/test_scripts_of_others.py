"""Scripts as others write them, in miniature: equal to plain PyTorch in float64, on one process
and, where nothing is drawn and the outputs keep the batch apart, on two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.pool import Pool
from tests.support.scripts import Wrap, furthest, weights

pytestmark = pytest.mark.multiprocess


class Digits(nn.Module):
    """pytorch/examples mnist: convolutions, dropout, log-probabilities; loss in the script."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 4, 3, 1)
        self.dropout = nn.Dropout(0.0)
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def mnist(wrap: Wrap) -> Iterator[Tensor]:
    """Adadelta, StepLR, nll_loss outside; a test loop in between."""
    model = Digits().double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model, optimizer = wrap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(2):
        model.train()
        for _ in range(2):
            data, target = torch.randn(4, 1, 8, 8).double(), torch.randint(0, 5, (4,))
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            yield loss
        model.eval()
        with torch.no_grad():
            yield F.nll_loss(model(torch.randn(4, 1, 8, 8).double()), torch.arange(4))
        scheduler.step()
    yield from weights(model)


class Vae(nn.Module):
    """pytorch/examples vae: encode, draw, decode; three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.fc3, self.fc4 = nn.Linear(3, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 12)))
        mean, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, logvar


def vae(wrap: Wrap) -> Iterator[Tensor]:
    """The sum of reconstruction and divergence; draws in the forward, so on one process only."""
    model = Vae().double()
    model, optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(3):
        data = torch.rand(4, 1, 3, 4).double()
        optimizer.zero_grad()
        torch.manual_seed(5)
        made, mean, logvar = model(data)
        loss = F.binary_cross_entropy(made, data.view(-1, 12), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
        loss.backward()
        yield loss.detach()
        optimizer.step()
    yield from weights(model)


class Words(nn.Module):
    """pytorch/examples word language model: (time, batch) tokens, and a state that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 6, 2, dropout=0.0)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 11), dim=1), hidden


def words(wrap: Wrap) -> Iterator[Tensor]:
    """`repackage_hidden`, clipping, and SGD written out; no optimizer."""
    model = wrap(Words().double())
    hidden = (torch.zeros(2, 4, 6).double(), torch.zeros(2, 4, 6).double())
    for _ in range(3):
        data, target = torch.randint(0, 11, (3, 4)), torch.randint(0, 11, (12,))
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, target)
        loss.backward()
        yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-2.0)
        yield loss.detach()
    yield from weights(model)


def dcgan(wrap: Wrap) -> Iterator[Tensor]:
    """Two models and optimizers; the critic learns of real and detached fake pictures."""
    real_label, fake_label = 1.0, 0.0
    maker = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 2, 1, 0, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh(),
    ).double()  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 1, 2, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    ).double()  # fmt: skip
    criterion = nn.BCELoss()
    critic, critic_steps = wrap(critic, torch.optim.Adam(critic.parameters(), lr=1e-2))
    maker, maker_steps = wrap(maker, torch.optim.Adam(maker.parameters(), lr=1e-2))
    for _ in range(2):
        critic.zero_grad()
        real = torch.rand(4, 1, 4, 4).double()
        label = torch.full((4,), real_label).double()
        error = criterion(critic(real), label)
        error.backward()
        fake = maker(torch.randn(4, 3, 1, 1).double())
        label.fill_(fake_label)
        other = criterion(critic(fake.detach()), label)
        other.backward()
        critic_steps.step()
        maker.zero_grad()
        label.fill_(real_label)
        made = criterion(critic(fake), label)
        made.backward()
        maker_steps.step()
        yield (error + other + made).detach()
    yield from weights(maker)
    yield from weights(critic)


class Waves(nn.Module):
    """pytorch/examples time sequence prediction: cells stepped in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2 = nn.LSTMCell(1, 3), nn.LSTMCell(3, 3)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h1, c1, h2, c2 = (torch.zeros(x.size(0), 3, dtype=torch.double) for _ in range(4))
        outputs = []
        for part in x.split(1, dim=1):
            h1, c1 = self.lstm1(part, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def waves(wrap: Wrap) -> Iterator[Tensor]:
    """LBFGS with a closure that runs the model several times a step."""
    model = Waves().double()
    x, y = torch.rand(4, 3).double(), torch.rand(4, 3).double()
    model, optimizer = wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3))
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    yield from losses
    yield from weights(model)


SCRIPTS = {"mnist": mnist, "vae": vae, "words": words, "dcgan": dcgan, "waves": waves}


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_process(name: str) -> None:
    assert furthest(SCRIPTS[name], {"devices": 1}) < 1e-12


@pytest.mark.parametrize("name", ["mnist", "words", "dcgan", "waves"])
def test_two_processes(pool: Pool, name: str) -> None:
    assert max(pool.run(2, furthest, SCRIPTS[name], {"data": 2})) < 1e-12
