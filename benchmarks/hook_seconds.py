"""CPU seconds that DDP's hook adds to a step, on gradients in the shapes of a known model.

    OMP_NUM_THREADS=1 python -m benchmarks hook_seconds --models resnet50 gpt2-small --json FILE

One rank, so nothing crosses a link: what is left is the work of encoding and decoding, with all
that is around it. `sn_compress.predict` times its inner loops alone. A model whose loss is the sum
of its parameters times fixed numbers has those numbers as gradients; methods take turns step by
step, and a row is the median. Only the shared exchange is measured: what a gather costs grows with
the number of ranks. From it and the bytes of a ring all-reduce comes the link on which a
method takes as long as plain, and as fp16, with nothing hidden behind computing.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from machine import origin
from resnet50_gradients import FixedGradients
from rows_file import flags, save
from timing import interleave, timed
from torch.nn.parallel import DistributedDataParallel

from sn_compress import LowRankCompression
from sn_compress.prediction.cost import layers
from sn_compress.torch.ddp import CompressionState, compression_hook

METHODS: dict[str, Any] = {
    "plain": None,
    "shared": LowRankCompression.using(ratio=100, warmup=1),
}


def normal_gradients(model: str) -> list[torch.Tensor]:
    """Normal numbers in the shapes of a known model."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(layer.shape, generator=generator) for layer in layers(model)]


def backward_seconds(ddp: DistributedDataParallel) -> float:
    """CPU seconds of a backward pass, the exchange included."""
    ddp.zero_grad()
    return timed(ddp().backward)


def seconds(model: str, steps: int) -> dict[str, float]:
    """CPU seconds of a backward pass by method; the median of the steps behind the first four."""
    trained = {}
    for name, compression in METHODS.items():
        ddp = DistributedDataParallel(FixedGradients(normal_gradients(model)))
        if compression:
            named = list(ddp.module.named_parameters())
            state = CompressionState(compression, named_parameters=named)
            ddp.register_comm_hook(state, compression_hook)
        trained[name] = ddp
    # DDP rearranges its buckets after the first step, and the shared exchange chooses its sizes.
    taken = interleave(
        {name: partial(backward_seconds, ddp) for name, ddp in trained.items()}, steps, settle=4
    )
    return {name: statistics.median(values) for name, values in taken.items()}


def break_even(elements: int, added: float, *, ranks: int, sent: float) -> float:
    """Gbit/s at which `added` seconds equal what the link saves.

    elements : of the model
    sent : bytes an element of the all-reduce that is compared with: 4, or 2 in fp16; what
        compression itself sends is left out, a hundredth of it
    """
    return 2 * (ranks - 1) / ranks * elements * sent * 8 / added / 1e9


def main() -> None:
    """Measure, print and write the rows."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "gpt2-small"])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the ring to compare with")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    print("model method CPU-s/step added break-even-plain break-even-fp16 (Gbit/s)")
    for model in args.models:
        elements = sum(layer.elements for layer in layers(model))
        taken = seconds(model, args.steps)
        for name in METHODS:
            row: dict[str, Any] = {"model": model, "method": name, "step_cpu_s": taken[name]}
            if name != "plain":
                row["added_cpu_s"] = added = taken[name] - taken["plain"]
                for against, sent in (("plain", 4), ("fp16", 2)):
                    link = break_even(elements, added, ranks=args.ranks, sent=sent)
                    row[f"break_even_{against}_gbit"] = round(link, 2)
            row |= {"ranks": args.ranks, "threads": torch.get_num_threads()}
            rows.append(row | origin())
            print(" ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    save(args.json, rows)
    time.sleep(0.2)  # Gloo's thread comes to rest before the group goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
