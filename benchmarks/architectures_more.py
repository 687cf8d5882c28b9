"""More architectures than architectures.py, each chosen for an unusual feature.

Backbones of images with tokens of classes, which write into their configuration in the first step;
hybrids of state spaces and attention; mixtures of experts whose loss has the router in it; slow
copies that follow the weights; parametrizations, old and new; recurrent nets by hand, in both
directions, and of sequences of several lengths; mixed precision by each of its doors.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from architectures import Architecture, Sample, _causal, _decoder, _images, _of, _tokens, _vision
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WIDTH = 32


def _rows(batch: int = 16, length: int = 12) -> Sample:
    return {"x": torch.randn(batch, length, WIDTH)}


class Blocks(nn.Module):
    """Residual blocks of linear layers, wrapped as asked."""

    def __init__(self, wrap: Any = lambda block: block, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                wrap(nn.Linear(WIDTH, 4 * WIDTH)),
                nn.GELU(),
                wrap(nn.Linear(4 * WIDTH, WIDTH)),
            )
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Momentum(nn.Module):
    """Two encoders, one of which follows the other slowly: MoCo's and BYOL's."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Blocks()
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.99).add_(own, alpha=0.01)
            key = functional.normalize(self.slow(x.flip(0)).mean(1), dim=-1)
        query = functional.normalize(self.online(x).mean(1), dim=-1)
        return functional.cross_entropy(query @ key.T / 0.2, torch.arange(len(x)))


class Centred(nn.Module):
    """A student, a teacher, and a centre in a buffer that follows what the teacher says: DINO's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Blocks()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            taught = self.teacher(x).mean(1)
            target = ((taught - self.centre) / 0.04).softmax(-1)
            self.centre.mul_(0.9).add_(taught.mean(0), alpha=0.1)
        return -(target * (self.student(x).mean(1) / 0.1).log_softmax(-1)).sum(-1).mean()


class Packed(nn.Module):
    """An LSTM in both directions over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(len(x)).remainder(x.shape[1]).add(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.net(packed)[0], batch_first=True)[0]


class Cells(nn.Module):
    """A cell called once for each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = x.new_zeros(len(x), WIDTH), []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class Precision(nn.Module):
    """Blocks and their loss, which is float32; autocast inside, around the blocks, if asked."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.net, self.inside = Blocks(), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.inside else nullcontext():
            x = self.net(x)
        return x.float().square().mean()


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def _segments() -> Sample:
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 3, (4, 8, 8))}


def _short(batch: int = 2, length: int = 16) -> Sample:
    tokens = _tokens(batch, length)
    return {"input_ids": tokens, "labels": tokens}


_SSM = {"vocab_size": 128, "hidden_size": WIDTH, "num_hidden_layers": 2}

MORE: dict[str, Architecture] = {
    "DINOv2": Architecture(
        lambda: _of("Dinov2ForImageClassification", "Dinov2Config", **_vision(), patch_size=8),
        _images,
    ),
    "SegFormer": Architecture(
        lambda: _of(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[8, 16, 32, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=16,
            num_labels=3,
        ),
        _segments,
    ),
    "BEiT": Architecture(
        lambda: _of("BeitForImageClassification", "BeitConfig", **_vision(), patch_size=8), _images
    ),
    "Swin V2": Architecture(
        lambda: _of(
            "Swinv2ForImageClassification",
            "Swinv2Config",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            window_size=4,
        ),
        _images,
    ),
    "Mamba2": Architecture(
        lambda: _of(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            **_SSM,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=8,
        ),
        _short,
    ),
    "Jamba": Architecture(
        _decoder(
            "Jamba",
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        _short,
    ),
    "Zamba2": Architecture(
        lambda: _of(
            "Zamba2ForCausalLM",
            "Zamba2Config",
            **_SSM | {"num_hidden_layers": 3},
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=8,
            mamba_headdim=8,
            n_mamba_heads=8,
            mamba_ngroups=2,
            chunk_size=8,
            use_mem_rope=False,
        ),
        _short,
    ),
    "RecurrentGemma": Architecture(
        lambda: _of(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            **_SSM | {"num_hidden_layers": 3},
            intermediate_size=64,
            num_attention_heads=4,
            lru_width=WIDTH,
            attention_window_size=16,
        ),
        _short,
    ),
    "Falcon-H1": Architecture(
        _decoder(
            "FalconH1",
            mamba_d_ssm=64,
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=8,
        ),
        _short,
    ),
    "Qwen3-MoE, router": Architecture(
        _decoder(
            "Qwen3Moe",
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            output_router_logits=True,
        ),
        _causal,
    ),
    "Mixtral, router": Architecture(
        _decoder("Mixtral", num_local_experts=4, output_router_logits=True), _causal
    ),
    "Momentum encoder": Architecture(Momentum, _rows),
    "Teacher with a centre": Architecture(Centred, _rows),
    "weight_norm, old": Architecture(lambda: Blocks(nn.utils.weight_norm), _rows),
    "weight_norm, new": Architecture(lambda: Blocks(parametrizations.weight_norm), _rows),
    "spectral_norm": Architecture(lambda: Blocks(parametrizations.spectral_norm), _rows),
    "orthogonal": Architecture(lambda: Blocks(parametrizations.orthogonal), _rows),
    "LSTM, packed": Architecture(Packed, _rows),
    "GRU, by cells": Architecture(Cells, _rows),
    "autocast inside": Architecture(lambda: Precision(inside=True), _rows),
    "autocast outside": Architecture(lambda: Precision(inside=False), _rows, _autocast),
    "bfloat16": Architecture(
        lambda: Precision(inside=False).bfloat16(),
        lambda: {"x": torch.randn(16, 12, WIDTH).bfloat16()},
    ),
}
