"""Real gradients for the codec benchmark: saved from training runs of two networks.

    python benchmarks/gradients.py [--out FILE]

Trains a convolutional net (SGD with momentum) and a small transformer (Adam) on Fashion-MNIST and
keeps the gradients of RUN steps in a row from each of the steps in AT, of a batch of 64: methods
that warm up on past gradients get their chance. Takes a minute; seeds are fixed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from nets import NETS, fashion_mnist
from torch import nn

AT = (5, 60, 200, 400)
RUN = 4
SMALLEST = 1024  # what travels plain is not compressed
OUT = Path(__file__).resolve().parent.parent / ".cache/gradients.npz"


def train(name: str) -> dict[str, np.ndarray]:
    """Gradients by "net/step/repeat/parameter", in the parameter's shape, float32."""
    torch.manual_seed(0)
    net = NETS[name]()
    images, labels = fashion_mnist("train")
    if name == "cnn":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    kept = {}
    last = AT[-1] + RUN
    for step in range(last):
        rows = order[64 * step : 64 * step + 64]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
        loss.backward()
        for first in AT:
            if first <= step < first + RUN:
                for parameter, value in net.named_parameters():
                    if value.numel() >= SMALLEST:
                        kept[f"{name}/{first}/{step - first}/{parameter}"] = (
                            value.grad.numpy().copy()
                        )
        optimizer.step()
        if step % 50 == 0 or step == last - 1:
            print(f"{name}: step {step}/{last}, loss {loss:.3f}", file=sys.stderr, flush=True)
    return kept


def load(path: Path = OUT) -> dict[str, np.ndarray]:
    """The saved gradients; made first where they are not there yet."""
    if not path.exists():
        kept = {key: value for name in NETS for key, value in train(name).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **kept)
    with np.load(path) as saved:
        return dict(saved)


def main() -> None:
    """Make the file, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    path = parser.parse_args().out
    gradients = load(path)
    tensors = {key.split("/", 3)[0] + " " + key.split("/", 3)[3] for key in gradients}
    print(f"{path}: {len(gradients)} gradients of {len(tensors)} tensors")


if __name__ == "__main__":
    main()
