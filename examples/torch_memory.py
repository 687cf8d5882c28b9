"""Train a small convolutional net within a memory budget; print what it saved and what it cost.

    python examples/torch_memory.py [--budget 60%] [--steps 20] [--batch 64]

The images are random, but their labels can be learned. The losses of the planned and the plain
run are the same to the bit.
"""

import argparse
import copy
import time

import torch
from torch import nn

import sn_memory.torch
from sn_memory.base.sizes import show_bytes


def network():
    """Return eight convolutions with batch norm."""
    layers, channels = [], 1
    for width in (32, 32, 32, 32, 64, 64, 64, 64):
        stride = 2 if width > channels > 1 else 1
        layers += [
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)
    )


class WithLoss(nn.Module):
    """A model that returns its loss, so that the loss is planned as well."""

    def __init__(self, model):
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, images, labels):
        return self.loss(self.model(images), labels)


def batches(steps, batch):
    """Yield random images whose label, the brightest of ten columns, can be learned."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.rand(batch, 1, 28, 28, generator=generator)
        yield images, images[:, 0, :, 4:24:2].mean(1).argmax(1)


def step():
    """Return a model, its input and its optimizer, for `sn memory estimate` and `export`."""
    return WithLoss(network()), next(batches(1, 64)), torch.optim.SGD


def train(model, steps, batch):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, began = [], time.perf_counter()
    for images, labels in batches(steps, batch):
        optimizer.zero_grad()
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    model = WithLoss(network())
    sample = next(batches(1, args.batch))
    estimate = sn_memory.torch.estimate(model, sample, optimizer=torch.optim.SGD)
    print(f"{estimate}\nlargest batch in 1 GiB: {estimate.largest_batch('1GiB')}\n")

    planned = sn_memory.torch.plan(copy.deepcopy(model), sample, args.budget)
    print(f"{sn_memory.torch.verify(planned, sample)}\n")

    plain_losses, plain_s = train(model, args.steps, args.batch)
    losses, planned_s = train(planned, args.steps, args.batch)
    assert losses == plain_losses
    plan = planned.sn_memory.plan
    print(
        f"{args.steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, the same to the bit\n"
        f"peak {show_bytes(plan.baseline_peak_bytes)} -> {show_bytes(plan.peak_bytes)}, "
        f"{plain_s:.1f} s -> {planned_s:.1f} s"
    )


if __name__ == "__main__":
    main()
