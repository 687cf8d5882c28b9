"""A small LSTM that reads characters, trained on two ranks under DDP: loss on text held back.

    torchrun --nproc-per-node 2 benchmarks/recurrent.py

The text is that of Python's own help pages, so losses are compared within one version of Python.
"""

from __future__ import annotations

from pydoc_data import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

STEPS, WIDTH = 300, 128
METHODS = {
    "plain": None,
    "low rank, 50": LowRankCompression.using(ratio=50),
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


def main() -> None:
    """Train with each method, and print a line of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pages = " ".join(topics.topics[name] for name in sorted(topics.topics))
    numbers = {character: at for at, character in enumerate(sorted(set(pages)))}
    text = torch.tensor([numbers[character] for character in pages])
    cut = len(text) * 9 // 10
    for name, compression in METHODS.items():
        torch.manual_seed(0)
        net = Reader(len(numbers))
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
