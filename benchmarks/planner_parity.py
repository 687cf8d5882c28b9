"""The same network in torch and in TensorFlow: peaks of the graphs, and live storages there.

    python -m benchmarks planner_parity [--json FILE] [--side PIXELS] [--batch N]

A forward and backward pass without workspaces; nothing is run. A row has both peaks, what is
resident, and the largest storages by kind of op at each peak.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import keras
import models
import tensorflow as tf
import torch
from machine import origin
from planner_tensorflow import transformer
from rows_file import flags, save
from torch import Tensor, nn
from torch.nn.functional import gelu

import sn_memory.tensorflow
import sn_memory.torch
from sn_memory import Graph
from sn_memory.graph.liveness import peak


class Attention(nn.Module):
    """Attention as Keras writes it: three products, the scores as a tensor."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in self.parts)
        scores = (query * shape[-1] ** -0.5) @ key.transpose(2, 3)
        return self.out((scores.softmax(3) @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Norm before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Stack(nn.Module):
    """Twelve blocks and a head on the first place, as `transformer` of planner_tensorflow.py."""

    def __init__(self, layers: int = 12, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, 0])


def pairs(side: int, batch: int) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Per network: torch's and its sample, Keras' and its sample."""
    images = torch.zeros(batch, 3, side, side), tf.TensorSpec((batch, side, side, 3))
    vectors = torch.zeros(batch, 128, 256), tf.TensorSpec((batch, 128, 256))
    settings: dict[str, Any] = {
        "weights": None,
        "input_shape": (side, side, 3),
        "classes": 10,
        "classifier_activation": None,
    }
    return {
        "resnet50": (
            models.resnet(50, classes=10),
            images[0],
            keras.applications.ResNet50(**settings),
            images[1],
        ),
        "vgg16": (
            models.vgg16(classes=10, size=side),
            images[0],
            keras.applications.VGG16(**settings),
            images[1],
        ),
        "transformer12": (Stack(), vectors[0], transformer(), vectors[1]),
    }


def alive(graph: Graph) -> dict[str, int]:
    """Bytes at the peak per kind of op that made them, the six largest."""
    maker = {name: op.kind for op in graph.ops for name in op.outputs}
    sizes: Counter[str] = Counter()
    for name, size in peak(graph).owners:
        sizes[maker.get(name, name if name in ("resident", "workspace") else "input")] += size
    return dict(sizes.most_common(7))


def main(argv: list[str]) -> int:
    """Trace, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    state = origin() | {"side": args.side, "batch": args.batch}
    for name, (one, sample, other, spec) in pairs(args.side, args.batch).items():
        graphs = {
            "torch": sn_memory.torch.trace(one, sample, profile=False).graph,
            "tensorflow": sn_memory.tensorflow.trace(other, spec, profile=False).graph,
        }
        row: dict[str, Any] = {"model": name, "kind": "parity", **state}
        for framework, graph in graphs.items():
            row |= {
                f"{framework}_peak_bytes": peak(graph).bytes,
                f"{framework}_base_bytes": graph.base_bytes,
                f"{framework}_alive": alive(graph),
            }
        rows.append(row)
        ratio = row["tensorflow_peak_bytes"] / row["torch_peak_bytes"]
        print(f"{name}: TensorFlow over torch {ratio:.4f}", flush=True)
        for framework in graphs:
            shown = {key: f"{size / 2**20:.1f}" for key, size in row[f"{framework}_alive"].items()}
            print(f"  {framework} {row[f'{framework}_peak_bytes'] / 2**20:.1f} MiB, of it {shown}")
        save(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
