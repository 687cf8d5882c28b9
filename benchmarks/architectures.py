"""Architectures from libraries, in tiny configurations built without downloads.

Those of transformers, diffusers, peft and torch_geometric as their users call them: default
settings where no size is meant, keyword arguments, the loss the model returns itself if it does.
The benchmark planner_architectures.py makes its table of them, and the tests of the planner run
each; a package that is missing is an ImportError of its builder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Sample = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A network, and how its users train it.

    Parameters
    ----------
    model
        Makes it, in training.
    sample
        Makes an input, as keyword arguments; tensors in it are drawn anew each time.
    around
        What its forward pass runs in, as autocast; it is planned in it as well.
    """

    model: Callable[[], nn.Module]
    sample: Callable[[], Sample]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss a model gives, or a mean of squares of what it gives instead."""
    if getattr(outputs, "loss", None) is not None:
        loss: torch.Tensor = outputs.loss
        return loss
    first = getattr(outputs, "sample", outputs)
    squares: torch.Tensor = first.float().pow(2).mean() if first.dim() else first
    return squares


def _of(name: str, config: str, package: str = "transformers", **settings: Any) -> nn.Module:
    library = importlib.import_module(package)
    model: nn.Module = getattr(library, name)(getattr(library, config)(**settings))
    return model.train()


def _tokens(batch: int = 4, length: int = 64, vocabulary: int = 128) -> torch.Tensor:
    return torch.randint(5, vocabulary, (batch, length))


def _causal() -> Sample:
    """What a data collator gives: tokens, a mask of ones, labels."""
    tokens = _tokens()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _pairs() -> Sample:
    tokens = _tokens()
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": _tokens(length=32),
    }


# Unset, the forward pass of the first step would write it into the configuration, which `plan`
# refuses to replay: as its message says, a step before planning would do as well.
_CLASSES = {"problem_type": "single_label_classification"}


def _images(size: int = 32, batch: int = 8) -> Sample:
    return {
        "pixel_values": torch.randn(batch, 3, size, size),
        "labels": torch.randint(0, 2, (batch,)),
    }


# The sizes most decoders ask for by these names.
_DECODER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ENCODER = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
_BOTH = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def _gpt2() -> nn.Module:
    return _of(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=128,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
    )


def _lora() -> nn.Module:
    peft = importlib.import_module("peft")
    settings = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model: nn.Module = peft.get_peft_model(
        _of("LlamaForCausalLM", "LlamaConfig", **_DECODER), settings
    )
    return model.train()


def _clip() -> nn.Module:
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return _of(
        "CLIPModel",
        "CLIPConfig",
        text_config={**size, "vocab_size": 128, "max_position_embeddings": 64, "eos_token_id": 2},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )


def _clip_sample() -> Sample:
    tokens = _tokens(8, 32)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(8, 3, 32, 32),
        "return_loss": True,
    }


def _whisper_sample() -> Sample:
    return {"input_features": torch.randn(2, 16, 128), "labels": _tokens(2, 32)}


def _wav2vec2() -> nn.Module:
    return _of(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        **_ENCODER | {"num_hidden_layers": 2},
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )


def _unet() -> nn.Module:
    diffusers = importlib.import_module("diffusers")
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=4,
        attention_head_dim=4,
    )
    return model.train()


def _unet_sample() -> Sample:
    return {
        "sample": torch.randn(4, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (4,)),
        "encoder_hidden_states": torch.randn(4, 8, 16),
    }


def _dit() -> nn.Module:
    diffusers = importlib.import_module("diffusers")
    model: nn.Module = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return model.train()


def _dit_sample() -> Sample:
    return {
        "hidden_states": torch.randn(4, 4, 16, 16),
        "timestep": torch.randint(0, 1000, (4,)),
        "class_labels": torch.randint(0, 10, (4,)),
    }


class Recurrent(nn.Module):
    """An embedding, two layers of a recurrent net with dropout between them, a head, a loss."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.layers = kind(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layers(self.embedding(tokens[:, :-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _gnn(name: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(importlib.import_module("torch_geometric.nn"), name)
        model: nn.Module = kind(16, 32, num_layers=4, out_channels=8, dropout=0.1, **more)
        return model.train()

    return make


def _gnn_sample() -> Sample:
    return {"x": torch.randn(256, 16), "edge_index": torch.randint(0, 256, (2, 4096))}


def _decoder(family: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: _of(f"{family}ForCausalLM", f"{family}Config", **{**_DECODER, **more})


ARCHITECTURES: dict[str, Architecture] = {
    "GPT-2": Architecture(_gpt2, _causal),
    "Llama": Architecture(_decoder("Llama"), _causal),
    "Qwen3": Architecture(_decoder("Qwen3", head_dim=8), _causal),
    "Mistral": Architecture(_decoder("Mistral", sliding_window=32), _causal),
    "Mixtral": Architecture(_decoder("Mixtral", num_local_experts=4), _causal),
    "BERT": Architecture(lambda: _of("BertForMaskedLM", "BertConfig", **_ENCODER), _causal),
    "RoBERTa": Architecture(
        lambda: _of("RobertaForMaskedLM", "RobertaConfig", **_ENCODER), _causal
    ),
    "T5": Architecture(
        lambda: _of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=128,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _pairs,
    ),
    "BART": Architecture(
        lambda: _of(
            "BartForConditionalGeneration", "BartConfig", max_position_embeddings=64, **_BOTH
        ),
        _pairs,
    ),
    "ViT": Architecture(
        lambda: _of(
            "ViTForImageClassification", "ViTConfig", **_vision(), patch_size=8, **_CLASSES
        ),
        _images,
    ),
    "Swin": Architecture(
        lambda: _of(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            window_size=4,
            **_CLASSES,
        ),
        _images,
    ),
    "Whisper": Architecture(
        lambda: _of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **_BOTH,
            num_mel_bins=16,
            max_source_positions=64,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        ),
        _whisper_sample,
    ),
    "CLIP": Architecture(_clip, _clip_sample),
    "Mamba": Architecture(
        lambda: _of(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=128,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
        ),
        lambda: {"input_ids": (tokens := _tokens(2, 16)), "labels": tokens},
    ),
    "wav2vec2": Architecture(
        _wav2vec2,
        lambda: {"input_values": torch.randn(2, 3200), "labels": torch.randint(1, 100, (2, 12))},
    ),
    "UNet2DCondition": Architecture(_unet, _unet_sample),
    "DiT": Architecture(_dit, _dit_sample),
    "LoRA": Architecture(_lora, _causal),
    "LSTM": Architecture(lambda: Recurrent(nn.LSTM), lambda: {"tokens": _tokens(16, 12)}),
    "GRU": Architecture(lambda: Recurrent(nn.GRU), lambda: {"tokens": _tokens(16, 12)}),
    "GraphSAGE": Architecture(_gnn("GraphSAGE"), _gnn_sample),
    "GAT": Architecture(_gnn("GAT", heads=4), _gnn_sample),
    "GCN": Architecture(_gnn("GCN", norm="batch"), _gnn_sample),
}


def _vision() -> dict[str, Any]:
    size = {
        name: _ENCODER[name]
        for name in _ENCODER
        if name not in ("vocab_size", "max_position_embeddings")
    }
    return size | {"image_size": 32}
