"""A layer of a GPT as Megatron-LM computes it, on one card: pre-norm, GELU, dropout, no fusion."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Attention and a feed-forward part of four times the width, each added to its input.

    Parameters
    ----------
    hidden, heads
        Width, and how many heads share it.
    recompute
        Whether the core of attention runs again in the backward pass.
    """

    def __init__(self, hidden: int, heads: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.into, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of q, k, v, each [batch * heads, length, head]."""
        empty = q.new_empty(q.size(0), q.size(1), k.size(1))
        scores = torch.baddbmm(
            empty, q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(q.size(2))
        )
        return torch.bmm(self.dropout(scores.softmax(-1)), v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer of x, both [length, batch, hidden]."""
        length, batch, hidden = x.shape
        mixed = self.into(self.first(x)).view(length, batch * self.heads, 3, -1)
        q, k, v = (it.transpose(0, 1) for it in mixed.unbind(2))
        made = checkpoint(self.core, q, k, v, use_reentrant=False) if self.recompute else None
        made = self.core(q, k, v) if made is None else made
        x = x + self.dropout(self.out(made.transpose(0, 1).reshape(length, batch, hidden)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))
