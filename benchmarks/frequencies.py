"""How much of gradient and memory a step sends: low rank and frequencies, in equal words.

    python -m benchmarks frequencies [--net cnn] [--directions 1 3] [--steps 60] [--json FILE]

Follows plain training of a net on eight simulated ranks with 8 images each; behind the first 100
steps every convolution's gradients go through both parts, each with memories of its own. Shares are
of squared norms of the ranks' mean, the mean over the second half of the steps; what is owed is in
norms of the gradient. Two minutes of one core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from nets import NETS, UNSEEN_NETS, fashion_mnist
from rows_file import flags, save
from simulated import Floats, rank_gradients, sum_in_order

from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import Method, StepOptions
from sn_compress.allreduce.methods.frequencies import Frequencies, kernels_of
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.ops.products import cut

RANKS, BATCH = 8, 8
BEFORE = 100  # steps
MAKE = NETS | UNSEEN_NETS
RATES = {"cnn": 0.05}  # of the study; 0.1 for others


class Followed:
    """One tensor sent by one part, on all ranks."""

    def __init__(self, name: str, part: Method, mean: Floats) -> None:
        self.name, self.part, self.bucket = name, part, Bucket([part])
        (self.shape,) = part.shapes
        state = part.begin(part.new_state(mean), [mean.reshape(self.shape)])
        self.states = [self.bucket.join(part.split(state))] * RANKS
        self.memories = [np.zeros(self.shape, np.float32)] * RANKS
        self.sent: list[float] = []
        self.residuals: list[float] = []

    def step(self, gradients: Sequence[Floats]) -> None:
        """One step of all ranks."""
        held = [
            memory + own.reshape(self.shape)
            for memory, own in zip(self.memories, gradients, strict=True)
        ]
        mean = np.mean(held, axis=0, dtype=np.float64)
        steps = [
            self.bucket.step(state, [own], StepOptions(RANKS, rank))
            for rank, (state, own) in enumerate(zip(self.states, held, strict=True))
        ]
        words, ends = [next(one) for one in steps], []
        while not ends:
            total, words = sum_in_order(words), []
            for one in steps:
                try:
                    words.append(one.send(total))
                except StopIteration as end:
                    ends.append(end.value)
        self.states = [end.state for end in ends]
        self.memories = [end.residuals[0] for end in ends]
        left = np.square(mean - ends[0].mean[0]).sum()
        self.sent.append(1 - left / np.square(mean).sum())
        self.residuals.append(math.sqrt(left / np.square(np.mean(gradients, axis=0)).sum()))

    def row(self) -> dict[str, Any]:
        """What came of it."""
        half = len(self.sent) // 2
        return {
            "tensor": self.name,
            "part": type(self.part).__name__,
            "directions": self.part.sizes[0],  # type: ignore[attr-defined]
            "words": sum(self.bucket.words(RANKS)),
            "sent": round(float(np.mean(self.sent[half:])), 3),
            "owed": round(float(np.mean(self.residuals[half:])), 2),
        }


def both(name: str, shape: tuple[int, ...], directions: int, mean: Floats) -> list[Followed]:
    """Low rank of so many directions, and frequencies in no more words."""
    low_rank = LowRank([cut(shape)], [directions])
    kernels = kernels_of(shape)
    if kernels is None:
        return []
    words = sum(low_rank.words(RANKS))
    high = kernels.count * min(kernels.outputs, kernels.inputs)
    size = 1
    while size < high and sum(Frequencies([kernels], [size + 1]).words(RANKS)) <= words:
        size += 1
    parts: list[Method] = [low_rank, Frequencies([kernels], [size])]
    return [Followed(f"{name} {'x'.join(map(str, shape))}", part, mean) for part in parts]


def follow(net_name: str, directions: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Train plainly, and send each gradient in all ways beside."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = MAKE[net_name]().to(memory_format=torch.channels_last)
    rate = RATES.get(net_name, 0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    images, labels = fashion_mnist("train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    followed: dict[int, list[Followed]] = {}
    for step in range(BEFORE + steps):
        rows = order[step * RANKS * BATCH :][: RANKS * BATCH]
        x = images[rows].view(RANKS, BATCH, *images.shape[1:])
        gradients, _ = rank_gradients(net, x, labels[rows].view(RANKS, BATCH))
        for at, (name, parameter) in enumerate(net.named_parameters()):
            own = [rank[at] for rank in gradients]
            mean = np.mean(own, axis=0, dtype=np.float32)
            if step == BEFORE and parameter.numel() >= 1024:
                pairs = [
                    both(name, tuple(parameter.shape), direction, mean) for direction in directions
                ]
                followed[at] = [one for pair in pairs for one in pair]
            for one in followed.get(at, []):
                one.step(own)
            parameter.grad = torch.from_numpy(mean).view(parameter.shape)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50)
        optimizer.step()
    return [{"net": net_name} | one.row() for group in followed.values() for one in group]


def main() -> None:
    """Measure, and print a line for each tensor and part."""
    parser = flags(__doc__)
    parser.add_argument("--net", default="cnn", choices=MAKE)
    parser.add_argument(
        "--directions", type=int, nargs="+", default=[1, 3], help="numbers of low-rank directions"
    )
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rows = follow(args.net, args.directions, args.steps)
    for row in rows:
        print(*(f"{key} {value}" for key, value in row.items()), sep=", ")
    save(args.json, rows)


if __name__ == "__main__":
    main()
