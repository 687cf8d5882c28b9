"""Small networks of many kinds, for held_bytes.py and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from models.densenet import densenet121
from models.mobilenet import mobilenet_v3_small
from models.resnet import resnet
from models.vgg import vgg16
from torch import nn

Net = Callable[[], tuple[nn.Module, Any]]


def _resnet50() -> tuple[nn.Module, Any]:
    return resnet(50), torch.randn(8, 3, 128, 128)


def _vgg() -> tuple[nn.Module, Any]:
    net = vgg16()
    return net[: [type(layer) for layer in net].index(nn.Flatten)], torch.randn(4, 3, 128, 128)


def _unet() -> tuple[nn.Module, Any]:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=64,
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return net, {"sample": torch.randn(4, 3, 64, 64), "timestep": torch.tensor(10)}


def _densenet() -> tuple[nn.Module, Any]:
    return densenet121(), torch.randn(4, 3, 128, 128)


def _efficientnet() -> tuple[nn.Module, Any]:
    config = transformers.EfficientNetConfig(
        image_size=128, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280
    )
    return transformers.EfficientNetModel(config), {"pixel_values": torch.randn(8, 3, 128, 128)}


def _mobilenet() -> tuple[nn.Module, Any]:
    return mobilenet_v3_small(), torch.randn(16, 3, 128, 128)


def _convnext() -> tuple[nn.Module, Any]:
    config = transformers.ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384])
    return transformers.ConvNextModel(config), {"pixel_values": torch.randn(8, 3, 128, 128)}


def _swin() -> tuple[nn.Module, Any]:
    config = transformers.SwinConfig(
        image_size=128, window_size=4, embed_dim=48, depths=[2, 2, 4, 2]
    )
    return transformers.SwinModel(config), {"pixel_values": torch.randn(8, 3, 128, 128)}


def _segformer() -> tuple[nn.Module, Any]:
    net = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig())
    return net, {"pixel_values": torch.randn(4, 3, 128, 128)}


def _conv3d() -> tuple[nn.Module, Any]:
    def two(width: int, out: int) -> list[nn.Module]:
        return [nn.Conv3d(width, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU()]

    net = nn.Sequential(
        *two(1, 16), *two(16, 32), nn.MaxPool3d(2), *two(32, 32), *two(32, 64), nn.MaxPool3d(2),
        *two(64, 64), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return net, torch.randn(4, 1, 32, 64, 64)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 256)
        self.lstm = nn.LSTM(256, 512, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(512, 2000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _lstm() -> tuple[nn.Module, Any]:
    return _Lstm(), torch.randint(0, 2000, (16, 128))


def _tokens(vocabulary: int, *size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, size)
    return {"input_ids": tokens, "labels": tokens}


def _gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(n_layer=6, n_embd=384, n_head=6, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens(50257, 4, 512)


def _vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.ViTModel(config), {"pixel_values": torch.randn(8, 3, 224, 224)}


def _bert() -> tuple[nn.Module, Any]:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024,
        vocab_size=8000,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config), _tokens(8000, 8, 256)


def _llama() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=768,
        vocab_size=8000, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(8000, 4, 512)


def _t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(
        d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, vocab_size=8000,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), _tokens(8000, 8, 128)


NETS: dict[str, Net] = {
    "ResNet-50": _resnet50,
    "VGG-16": _vgg,
    "U-Net": _unet,
    "DenseNet-121": _densenet,
    "MobileNetV3": _mobilenet,
    "EfficientNet-B0": _efficientnet,
    "ConvNeXt": _convnext,
    "Swin": _swin,
    "SegFormer": _segformer,
    "3-D convolutions": _conv3d,
    "LSTM": _lstm,
    "GPT-2": _gpt2,
    "ViT": _vit,
    "BERT": _bert,
    "Llama": _llama,
    "T5": _t5,
}
