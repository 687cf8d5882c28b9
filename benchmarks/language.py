"""A transformer of 7.4 million parameters, and the text it reads, which comes with Python.

Words and signs of the help pages in `pydoc_data` are the tokens, the 2,047 most frequent of them
by number and all others as 0. Two versions of Python have slightly different pages, so losses are
compared between runs of one version only.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pydoc_data import topics

import torch
from models.transformers import Gpt2Block
from torch import Tensor, nn

VOCABULARY = 2048


class Language(nn.Module):
    """Tokens [batch, length] int64 to logits [batch, length, VOCABULARY]; the head is its own."""

    def __init__(self, width: int = 256, layers: int = 8, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Gpt2Block(width, heads, 0.0) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1])
        return self.head(self.norm(self.blocks(self.tokens(numbers) + self.places(places))))


@cache
def text() -> Tensor:
    """All tokens [n] int64."""
    pages = " ".join(topics.topics[name] for name in sorted(topics.topics))
    words = re.findall(r"\w+|[^\w\s]", pages)
    # Ties by the alphabet, so that no run numbers them otherwise.
    ranked = sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))
    number = {word: place + 1 for place, (word, _) in enumerate(ranked[: VOCABULARY - 1])}
    return torch.tensor([number.get(word, 0) for word in words])


def batch(
    rows: int, length: int, generator: torch.Generator, *, held_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens [rows, length] and those that follow them, of the first nine tenths or of the last."""
    corpus = text()
    cut = len(corpus) * 9 // 10
    part = corpus[cut:] if held_out else corpus[:cut]
    starts = torch.randint(len(part) - length - 1, (rows,), generator=generator)
    taken = torch.stack([part[start : start + length + 1] for start in starts.tolist()])
    return taken[:, :-1], taken[:, 1:]


def loss_of(net: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token."""
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1), following.flatten())
