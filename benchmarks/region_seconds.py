"""Seconds of a step by regions, over those of one graph with the same peak.

    OMP_NUM_THREADS=1 python -m benchmarks region_seconds [--places NAME ...] [--steps N]

GPT-2 (6 layers, width 256, 4 times 256 tokens) at 45 % of its plain step, with breaks after some of
its layers: a number is looked at there. The same net without breaks is planned as one graph for the
peak that was measured of the first. Steps of both and of the plain net take turns, in an order that
turns around; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

import sn_memory.torch
from sn_memory.torch.model.tracker import AllocationTracker

LAYERS, SHARE = 6, "45%"
PLACES = {"middle": (2,), "three": (1, 3, 4), "all": tuple(range(LAYERS))}
WARM = 2


class Looked(nn.Module):
    """A layer, and a look at a number after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.layer(*args, **kwargs)
        states = outputs[0] if isinstance(outputs, tuple) else outputs
        if states.detach().flatten()[0].item() > 1e6:
            raise ValueError("it diverged")
        return outputs


class Text(nn.Module):
    """GPT-2 with its loss."""

    def __init__(self, breaks: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_embd=256, n_layer=LAYERS, n_head=4, vocab_size=500, n_positions=256, bos_token_id=0,
            eos_token_id=0, use_cache=False,
        )  # fmt: skip
        self.net = transformers.GPT2LMHeadModel(config)
        for at in breaks:
            self.net.transformer.h[at] = Looked(self.net.transformer.h[at])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss


def text() -> torch.Tensor:
    """Return [4, 256] tokens."""
    return torch.randint(0, 500, (4, 256), generator=torch.Generator().manual_seed(1))


def peak_of(model: nn.Module, ids: torch.Tensor) -> int:
    """Return the most that a step has of the allocator."""
    model.zero_grad()
    with AllocationTracker([*model.parameters(), *model.buffers(), ids], kernels=True) as tracker:
        model(ids).backward()
    return tracker.peak_bytes


def seconds_of(model: nn.Module, ids: torch.Tensor) -> float:
    """Return the processor seconds of a step."""
    model.zero_grad()
    torch.manual_seed(5)
    began = time.process_time()
    model(ids).backward()
    return time.process_time() - began


def row(place: str, steps: int) -> dict[str, Any]:
    """Plan a net with breaks and one without; let their steps take turns."""
    ids = text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = sn_memory.torch.plan(Text(PLACES[place]).train(), ids, SHARE, backend="regions")
        peak = max(peak_of(parts, ids) for _ in range(WARM))
        by_graph = sn_memory.torch.plan(Text(()).train(), ids, peak, backend="graph")
    models = {"plain": Text(()).train(), "graph": by_graph, "regions": parts}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for at in range(WARM + steps):
        for name in list(models)[:: 1 if at % 2 else -1]:
            taken = seconds_of(models[name], ids)
            if at >= WARM:
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    pairs = zip(seconds["regions"], seconds["graph"], strict=True)
    return {
        "breaks": place,
        "peak_bytes": {"graph": peak_of(by_graph, ids), "regions": peak},
        "seconds": medians,
        "ratio": medians["regions"] / medians["graph"],
        "ratio_of_pairs": statistics.median(mine / own for mine, own in pairs),
        "steps": steps,
    }


def main() -> None:
    """Run and print a line of JSON for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", nargs="*", choices=[*PLACES], default=[*PLACES])
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for place in options.places:
        print(json.dumps(row(place, options.steps)), flush=True)


if __name__ == "__main__":
    main()
