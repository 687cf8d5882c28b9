"""A small character LSTM trained on two ranks under DDP: validation loss.

    torchrun --nproc-per-node 2 -m benchmarks recurrent
    python -m benchmarks recurrent --orders

The second prints what 4 % of a gradient's frequencies hold, by the order in which its numbers lie.

The text is that of Python's own help pages, so losses are compared within one version of Python.
"""

from __future__ import annotations

import sys
from pydoc_data import topics

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

STEPS, WIDTH = 300, 128
METHODS = {
    "plain": None,
    "low rank, 32": LowRankCompression.using(ratio=32),
    "low rank, 50": LowRankCompression.using(ratio=50),
    "low rank, 67": LowRankCompression.using(ratio=67),
    "FFT, theta 0.9": FFTCompression,
    "FFT, theta 0.96": FFTCompression.using(theta=0.96),
    "FFT, theta 0.98": FFTCompression.using(theta=0.98),
    "FFT, theta 0.98, one transform": FFTCompression.using(theta=0.98, block=None),
    "top-k, theta 0.98": FFTCompression.using(theta=0.98, transform="identity"),
}


class Reader(nn.Module):
    """Characters [batch, length] int64 to logits of the next ones."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.lstm = nn.LSTM(64, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def batch(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of 32 characters, and those that follow each."""
    starts = torch.randint(len(text) - 33, (count,), generator=generator)
    rows = torch.stack([text[start : start + 33] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(net: nn.Module, x: Tensor, following: Tensor) -> Tensor:
    """Nats a character."""
    return nn.functional.cross_entropy(net(x).flatten(0, 1), following.flatten())


def text_of() -> tuple[Tensor, int]:
    """Python's help pages as numbers of characters, and how many characters there are."""
    pages = " ".join(topics.topics[name] for name in sorted(topics.topics))
    numbers = {character: at for at, character in enumerate(sorted(set(pages)))}
    return torch.tensor([numbers[character] for character in pages]), len(numbers)


def held(vectors: np.ndarray) -> float:
    """Share of the energy in the strongest 4 % of the frequencies of rows, or of the numbers."""
    energy = np.sort(np.square(np.abs(vectors)).ravel())[::-1]
    return energy[: energy.size // 25].sum() / energy.sum()


def frequencies(matrix: np.ndarray, span: int = 64) -> np.ndarray:
    """Of each stretch of a matrix, one row behind the other."""
    spectrum = np.fft.rfft(matrix.reshape(-1, span), axis=1, norm="ortho")
    spectrum[:, 1:-1] *= 2**0.5  # each stands for its mirror image, too
    return spectrum


def orders() -> None:
    """Print what gradients of the LSTM's matrices hold, over the steps of a plain training."""
    text, characters = text_of()
    torch.manual_seed(0)
    net = Reader(characters)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(100)
    shares: dict[tuple[str, str], list[float]] = {}
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(net, *batch(text, 16, generator)).backward()
        for name in ("weight_ih_l0", "weight_hh_l0") if step % 50 == 0 and step else ():
            matrix = getattr(net.lstm, name).grad.numpy()
            gates = matrix.reshape(4, WIDTH, -1)
            for order, vectors in {
                "no transform": matrix,
                "as it lies, rows of inputs": frequencies(matrix),
                "one transform over all": frequencies(matrix, matrix.size),
                "along hidden units, gate by gate": frequencies(gates.transpose(0, 2, 1).copy()),
                "hidden units, gates side by side": frequencies(gates.transpose(1, 2, 0).copy()),
            }.items():
                shares.setdefault((name, order), []).append(held(vectors))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    for (name, order), values in shares.items():
        print(f"{name:14} {order:34} {100 * np.mean(values):3.0f} %")


def main() -> None:
    """Train with each method, and print a line of it."""
    torch.set_num_threads(1)
    if "--orders" in sys.argv[1:]:
        orders()
        return
    dist.init_process_group("gloo")
    text, characters = text_of()
    cut = len(text) * 9 // 10
    for name, compression in METHODS.items():
        torch.manual_seed(0)
        net = Reader(characters)
        ddp, state = DistributedDataParallel(net), None
        if compression is not None:
            state = CompressionState(compression, named_parameters=net.named_parameters())
            ddp.register_comm_hook(state, compression_hook)
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, *batch(text[:cut], 16, generator)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            held_back = [loss_of(net, *batch(text[cut:], 64, generator)) for _ in range(4)]
        if dist.get_rank() == 0:
            ratio = state.report()["ratio_after_warmup"] if state else 1.0
            print(f"{name:32} {torch.stack(held_back).mean():.3f} {ratio:6.1f}x", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
