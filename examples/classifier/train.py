"""A training loop as in any tutorial: the loss is computed from the model's outputs.

    python examples/classifier/train.py
    graphaccel run --devices 2 examples/classifier/train.py

Pictures of bars, upright or lying, with noise; no file is read. Each process takes its part of
every batch.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import graphaccel


def pictures(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [count, 1, 8, 8] and int64 [count]: 0 for an upright bar, 1 for one that lies."""
    labels = torch.randint(0, 2, (count,), generator=generator)
    images = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    places = torch.randint(0, 8, (count,), generator=generator)
    for image, label, place in zip(images, labels, places, strict=True):
        (image[0, :, place] if label == 0 else image[0, place]).add_(1.0)
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small classifier on made-up pictures.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=64, help="pictures a step, over all processes")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = graphaccel.optimize(model, optimizer)

    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        images, labels = pictures(options.batch, generator)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right = (logits.argmax(1) == labels).float().mean().item()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}, right {right:.2f}")

    model.eval()
    images, labels = pictures(512, generator)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(f"of new pictures: right {right:.2f}")


if __name__ == "__main__":
    main()
