"""Models with value-dependent control flow, trained within a budget by regions.

    python -m benchmarks regions [--only NAME ...] [--shares 50 40] [--json FILE]

Each net is planned on one batch, or those that SAMPLES names, and then makes five steps on other
batches, beside a copy without a plan. Peaks are of torch's CPU allocator, which counts what kernels
take for themselves as well. Rows of FILE that are not made anew stay; of the file in results/ the
table on the page is written as well.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rows_file import flags, load, save
from tables import markdown, put_into
from torch import nn

import sn_memory.torch
from sn_memory.torch.model.tracker import AllocationTracker

STEPS = 5
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch_memory_measured.md"
RESULTS = ROOT / "benchmarks" / "results" / "regions.json"
Batches = Callable[[int], Any]


class TopTwo(nn.Module):
    """Experts in a loop, each given the rows that chose it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, which = torch.where(chosen == number)
            if at.numel():
                out = out.index_add(0, at, expert(rows[at]) * weights[at, which, None])
        return out.view_as(x)


class Experts(nn.Module):
    """Layers of attention, each followed by experts."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(layers)
        )
        self.experts = nn.ModuleList(TopTwo(width, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = attention(x)
            x = x + experts(x)
        return x.square().mean()


class Pooled(nn.Module):
    """A graph network that keeps the four fifths of its nodes that score highest."""

    def __init__(self, width: int = 128, layers: int = 4) -> None:
        from torch_geometric.nn import SAGEConv, SAGPooling

        super().__init__()
        self.stem = nn.Linear(16, width)
        self.convolutions = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.pools = nn.ModuleList(SAGPooling(width, 0.8) for _ in range(layers))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.stem(nodes)
        for convolution, net, pool in zip(self.convolutions, self.nets, self.pools, strict=True):
            x = convolution(x, edges).relu()
            x, edges, *_ = pool(x + net(x), edges)
        return x.square().mean()


class Masked(nn.Module):
    """Only what a mask shows goes on."""

    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = x[mask]
        for layer in self.layers:
            rows = rows + layer(rows)
        return torch.zeros_like(x).masked_scatter(mask[..., None], rows).square().mean()


class Boxes(nn.Module):
    """DETR with a small ResNet: queries are matched with boxes in its loss."""

    def __init__(self) -> None:
        super().__init__()
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1],
            layer_type="basic", out_features=["stage4"],
        )  # fmt: skip
        config = transformers.DetrConfig(
            backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False,
            backbone=None, d_model=128, encoder_layers=4, decoder_layers=4,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=512,
            decoder_ffn_dim=512, num_queries=100, num_labels=10,
        )  # fmt: skip
        # Of a ResNet of transformers the whole backbone would be frozen.
        self.net = transformers.DetrForObjectDetection(config).requires_grad_(True)

    def forward(
        self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        labels = [{"class_labels": of, "boxes": at} for of, at in zip(classes, boxes, strict=True)]
        loss: torch.Tensor = self.net(pixel_values=images, labels=labels).loss
        return loss


class Loss(nn.Module):
    """A model of transformers that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(**inputs).loss
        return loss


def _sound(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(4, 32_000, generator=generator)
    return {"input_values": sound, "labels": torch.randint(1, 30, (4, 12), generator=generator)}


_WAV = {
    "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 768,
    "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 32, "layerdrop": 0.1, "mask_time_prob": 0.2,
    "vocab_size": 32, "ctc_zero_infinity": True, "feat_extract_norm": "group",
}  # fmt: skip


def wav2vec2() -> tuple[nn.Module, Batches]:
    """LayerDrop, masks that NumPy draws, and CTC."""
    return Loss(transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**_WAV))), _sound


def hubert() -> tuple[nn.Module, Batches]:
    """The same, another encoder."""
    return Loss(transformers.HubertForCTC(transformers.HubertConfig(**_WAV))), _sound


def whisper() -> tuple[nn.Module, Batches]:
    """Encoder and decoder with LayerDrop and masks."""
    config = transformers.WhisperConfig(
        d_model=128, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=500,
        num_mel_bins=40, max_source_positions=200, apply_spec_augment=True, use_cache=False,
        mask_time_prob=0.2,
        encoder_layerdrop=0.1, decoder_layerdrop=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip

    def batch(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(4, 40, 400, generator=generator)
        return {
            "input_features": features,
            "labels": torch.randint(3, 500, (4, 60), generator=generator),
        }

    return Loss(transformers.WhisperForConditionalGeneration(config)), batch


def experts() -> tuple[nn.Module, Batches]:
    """Four layers of four experts."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(seed)),)

    return Experts(), batch


def pooled() -> tuple[nn.Module, Batches]:
    """A graph of 2,048 nodes."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        nodes = torch.randn(2048, 16, generator=generator)
        return nodes, torch.randint(0, 2048, (2, 8192), generator=generator)

    return Pooled(), batch


def masked() -> tuple[nn.Module, Batches]:
    """Seven rows of ten, drawn anew for each batch."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 256, 128, generator=generator)
        return x, torch.rand(8, 256, generator=generator) < 0.7

    return Masked(), batch


def detr() -> tuple[nn.Module, Batches]:
    """Six boxes an image."""

    def batch(seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(4, 3, 256, 256, generator=generator)
        classes = torch.randint(0, 10, (4, 6), generator=generator)
        return images, classes, torch.rand(4, 6, 4, generator=generator) * 0.4 + 0.3

    return Boxes(), batch


class Adapted(nn.Module):
    """A layer with an adapter that a hook adds where tokens are shown."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)
        self.shown = torch.zeros(0)
        self.register_forward_hook(Adapted.added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x)
        return output

    @staticmethod
    def added(module: Adapted, args: Any, result: torch.Tensor) -> torch.Tensor:
        at = module.shown.flatten().nonzero().squeeze(1)
        more = module.up(module.down(args[0].flatten(0, 1)[at]))
        flat = result.flatten(0, 1)
        return torch.zeros_like(flat).index_add(0, at, more).add(flat).view_as(result)


class Activated(nn.Module):
    """GPT-2 with adapters that are on from a token on."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            n_embd=192, n_layer=6, n_head=4, vocab_size=500, n_positions=256, bos_token_id=0,
            eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.net = transformers.GPT2LMHeadModel(config).requires_grad_(False)
        for block in self.net.transformer.h:
            block.mlp.c_fc = Adapted(block.mlp.c_fc, 192, 768)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shown = (input_ids == 7).cumsum(1) > 0
        for block in self.net.transformer.h:
            block.mlp.c_fc.shown = shown
        loss: torch.Tensor = self.net(input_ids=input_ids, labels=labels).loss
        return loss


def lora() -> tuple[nn.Module, Batches]:
    """Adapters that a hook switches on where `nonzero` says."""

    def batch(seed: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 100, (4, 192), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    return Activated(), batch


def alora() -> tuple[nn.Module, Batches]:
    """GPT-2 with PEFT's adapters that are on from a token on."""
    import peft

    config = transformers.GPT2Config(
        n_embd=192, n_layer=6, n_head=4, vocab_size=500, n_positions=256, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
        alora_invocation_tokens=[7],
    )  # fmt: skip
    net = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)
    return Loss(net), lora()[1]


NETS = {
    function.__name__: function
    for function in (wav2vec2, hubert, whisper, experts, pooled, masked, detr, lora, alora)
}
# Seeds of the batches that a plan is made for; steps take others. How many rows stay is shown by no
# shape of what these nets are given, so three batches are.
SAMPLES = dict.fromkeys(("masked", "lora", "alora"), (0, 6, 7))
TITLES = {
    "wav2vec2": "Wav2Vec2ForCTC, LayerDrop and SpecAugment",
    "hubert": "HubertForCTC, the same",
    "whisper": "Whisper, LayerDrop and SpecAugment",
    "experts": "top-2 experts in a loop",
    "pooled": "graph network of PyG, SAGPooling",
    "masked": "boolean masks",
    "detr": "DETR with its matching loss",
    "lora": "GPT-2, adapters switched on by `nonzero` in a hook",
    "alora": "GPT-2 with PEFT's `alora_invocation_tokens`",
}


def seeded(seed: int) -> None:
    """Let all generators draw from a seed on."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what models draw from


def step(model: nn.Module, batch: Any, seed: int) -> tuple[int, list[torch.Tensor | None], float]:
    """Return peak, gradients and processor seconds of a step."""
    model.zero_grad()
    seeded(seed)
    leaves = list(batch.values() if isinstance(batch, dict) else batch)
    known = [*model.parameters(), *model.buffers(), *leaves]
    began = time.process_time()
    with AllocationTracker(known, kernels=True) as tracker:
        loss = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss.backward()
    seconds = time.process_time() - began
    return tracker.peak_bytes, [parameter.grad for parameter in model.parameters()], seconds


def equal(mine: list[torch.Tensor | None], own: list[torch.Tensor | None]) -> bool:
    """Whether gradients are equal to the bit."""
    return all(
        left is right if left is None or right is None else torch.equal(left, right)
        for left, right in zip(mine, own, strict=True)
    )


def row(name: str, share: int) -> dict[str, Any]:
    """Plan a net and train it beside its plain twin."""
    seeded(0)
    net, batch = NETS[name]()
    net.train()
    seeded(0)
    plain = NETS[name]()[0].train()
    result: dict[str, Any] = {"net": name, "share": share}
    samples = [batch(seed) for seed in SAMPLES.get(name, (0,))]
    began = time.perf_counter()
    budget: int | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planned = sn_memory.torch.plan(net, samples, f"{share}%")
        except sn_memory.BudgetError as error:
            budget = error.budget_bytes
            planned = sn_memory.torch.plan(net, samples, error.peak_bytes)
        result["plan_s"] = round(time.perf_counter() - began, 1)
        record = planned.sn_memory
        result["backend"] = record.backend
        rows = [
            (step(plain, batch(at), at), step(planned, batch(at), at)) for at in range(1, 1 + STEPS)
        ]
    top, plain_bytes = max(mine[0] for _, mine in rows), record.plan.baseline_peak_bytes
    sizes = {
        "budget": budget or record.budget_bytes,
        "allowed": record.budget_bytes,
        "predicted": record.plan.peak_bytes,
        "top": top,
        "plain": plain_bytes,
    }
    result |= {f"{name}_mib": round(size / 2**20, 1) for name, size in sizes.items()}
    result["percent"] = round(100 * top / plain_bytes)
    result["equal"] = sum(equal(mine[1], own[1]) for own, mine in rows)
    result["seconds"] = [round(mine[2] / own[2], 2) for own, mine in rows]
    print(record.plan, flush=True)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    head = (
        "net", "asked, %", "back end", "plain, MiB", "allowed", "most of five steps", "% of plain",
        "equal", "processor seconds",
    )  # fmt: skip
    return markdown(
        head,
        (
            (
                TITLES[row["net"]],
                str(row["share"]),
                row["backend"],
                str(row["plain_mib"]),
                str(row["allowed_mib"])
                + ("" if row["allowed_mib"] == row["budget_mib"] else ", the least"),
                str(row["top_mib"]),
                str(row["percent"]),
                f"{row['equal']} of {STEPS}",
                f"{statistics.median(row['seconds']):.2f}",
            )
            for row in rows
        ),
    )


def main() -> None:
    """Run and print."""
    parser = flags(__doc__)
    parser.add_argument("--only", nargs="*", default=[*NETS])
    parser.add_argument("--shares", nargs="*", type=int, default=[50, 40])
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    kept = load(options.json)
    by_key = {(row["net"], row["share"]): row for row in kept}
    for name in options.only:
        for share in options.shares:
            measured = row(name, share)
            by_key[name, share] = measured
            print(measured, flush=True)
    rows = sorted(by_key.values(), key=lambda row: ([*NETS].index(row["net"]), -row["share"]))
    print(table(rows))
    save(options.json, rows)
    if options.json and options.json.resolve() == RESULTS:
        put_into(PAGE, "regions", table(rows))


if __name__ == "__main__":
    main()
