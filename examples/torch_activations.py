"""Train a small net with compressed activations, then use the saved memory for a larger batch.

    python examples/torch_activations.py [--error 0.05] [--steps 30] [--batch 32]

The images are random, but their labels can be learned. Prints bits per layer, bytes and losses.
"""

import argparse
import copy
import time

import torch
from torch import nn

import sn_memory.torch
from sn_memory.activations import suggest_batch
from sn_memory.base.sizes import show_bytes


def network():
    """Return six convolutions, two poolings and one linear layer."""
    layers, channels = [], 1
    for width in (16, 16, 32, 32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        if width == channels < 64:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def batches(steps, batch):
    """Yield random images whose label is the brightest of ten columns."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.rand(batch, 1, 28, 28, generator=generator)
        images[:, 0, :, 4:24:2] *= 2
        yield images, images[:, 0, :, 4:24:2].mean(1).argmax(1)


def train(model, steps, batch, optimizer):
    """Return the losses and the median seconds of a step."""
    losses, seconds = [], []
    for images, labels in batches(steps, batch):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    return losses, sorted(seconds)[len(seconds) // 2]


def line(small_s, large_s, small, large):
    """Return the seconds of a step as (constant, per sample), from two measured batches."""
    per_sample = max((large_s - small_s) / (large - small), 1e-9)
    return max(small_s - per_sample * small, 0.0), per_sample


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--error", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    torch.manual_seed(0)
    start = network()
    seconds, losses = {}, {}
    for way in ("plain", "compressed"):
        for batch in (args.batch, args.batch // 2):
            model = copy.deepcopy(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            compressed = None
            if way == "compressed":
                compressed = sn_memory.torch.compress_activations(  # <- sn
                    model, error=args.error, optimizer=optimizer, every=10
                )
            losses[way, batch], seconds[way, batch] = train(model, args.steps, batch, optimizer)
            if compressed is not None and batch == args.batch:
                saved = compressed.saved
                print(compressed.report())
    for way in ("plain", "compressed"):
        first, last = losses[way, args.batch][0], losses[way, args.batch][-1]
        print(f"{way}: loss {first:.3f} -> {last:.3f}, {seconds[way, args.batch]:.3f} s a step")

    fixed = 3 * 4 * sum(p.numel() for p in start.parameters())  # with gradients and momentum
    budget = fixed + saved.plain_bytes + 12 * 16 * 28 * 28 * args.batch
    best = suggest_batch(
        budget,
        fixed_bytes=fixed,
        sample_bytes=saved.plain_bytes / args.batch,
        compressed_sample_bytes=saved.compressed_bytes / args.batch,
        transient_sample_bytes=12 * 16 * 28 * 28,  # of a layer: input, output, one gradient
        **{
            name: line(seconds[way, args.batch // 2], seconds[way, args.batch], args.batch // 2,
                       args.batch)
            for name, way in (("step_s", "plain"), ("compressed_step_s", "compressed"))
        },
    )  # fmt: skip
    print(
        f"in {show_bytes(budget)}: batch {best.plain_batch} plain, {best.batch} compressed; "
        f"{best.plain_samples_per_s:.0f} and {best.samples_per_s:.0f} images a second expected"
    )


if __name__ == "__main__":
    main()
