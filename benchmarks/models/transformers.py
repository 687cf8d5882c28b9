"""GPT-2 (Radford et al., 2019), BERT (Devlin et al., 2018), Llama (Touvron et al., 2023).

Blocks of our own with the papers' shapes and parameter counts; weights are random. Each takes token
numbers [batch, length] int64. GPT-2 and Llama return logits, BERT its hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu


class Attention(nn.Module):
    """Attention of several heads; one product makes queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt2Block(nn.Module):
    """Norm before each part."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True, dropout=dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.ln1(x)))
        return x + self.drop(self.down(gelu(self.up(self.ln2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    """GPT-2; the defaults are the small one. The head shares the embedding's weights."""

    def __init__(
        self,
        *,
        vocabulary: int = 50257,
        length: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Gpt2Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.drop(self.tokens(numbers) + self.places(places))
        return self.head(self.norm(self.blocks(x)))


class BertBlock(nn.Module):
    """Norm after each part."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.attention = Attention(width, heads, causal=False, dropout=dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.drop(self.attention(x)))
        return self.ln2(x + self.drop(self.down(gelu(self.up(x)))))


class Bert(nn.Module):
    """BERT without a task's head; the defaults are the base model. One segment."""

    def __init__(
        self,
        *,
        vocabulary: int = 30522,
        length: int = 512,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(BertBlock(width, heads, dropout) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        x = self.tokens(numbers) + self.places(places) + self.segments.weight[0]
        x = self.blocks(self.drop(self.norm(x)))
        return x, torch.tanh(self.pooler(x[:, 0]))


class LlamaBlock(nn.Module):
    """RMS norm, rotated queries and keys, grouped heads, gated units."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // heads * groups, bias=False)
        self.v = nn.Linear(width, width // heads * groups, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(batch, length, heads, -1).transpose(1, 2)
            for part, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        y = scaled_dot_product_attention(
            _rotated(q, cos, sin),
            _rotated(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.groups != self.heads,
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Llama(nn.Module):
    """Llama; the defaults are Llama-2 of 7 billion parameters."""

    def __init__(
        self,
        *,
        vocabulary: int = 32000,
        width: int = 4096,
        layers: int = 32,
        heads: int = 32,
        groups: int = 32,
        hidden: int = 11008,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.side = width // heads

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device, dtype=torch.float32)
        rates = torch.arange(0, self.side, 2, device=numbers.device, dtype=torch.float32)
        angles = torch.outer(places, 10000.0 ** (-rates / self.side)).repeat(1, 2)
        cos, sin = angles.cos().to(self.head.weight.dtype), angles.sin().to(self.head.weight.dtype)
        x = self.tokens(numbers)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
