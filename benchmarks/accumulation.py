"""Micro-batches whose gradients are summed: peaks, sums and seconds, with and without a plan.

    python -m benchmarks accumulation [--json FILE] [--models NAME ...]

Each network runs four micro-batches without setting gradients to None in between, without a plan
and planned for 100 % of the peak with gradients in place, and for less:
halfway from there to the smallest peak that is found. The first micro-batch finds no gradients, all
others do. Peaks are of live storages (StorageTracker); sums are held against torch's own, bit by
bit; seconds are the least of 20 micro-batches that find gradients, in seconds of the process; all
on one thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import origin
from planner_torch import QUICK
from rows_file import flags, save
from torch import nn

from sn_memory import BudgetError, plan_graph
from sn_memory.graph.liveness import peak, unplanned_bytes
from sn_memory.torch import StorageTracker, plan, trace

STEPS = 20
MICRO_BATCHES = 4


def wide() -> nn.Module:
    """Six layers whose weights are all there is to them."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "6 x linear 512, 16": (wide, lambda: torch.randn(16, 512)),
    **{name: QUICK[name] for name in ("resnet50/8", "vgg16/8", "unet/8")},
}


def gpt2() -> nn.Module:
    """A tiny GPT-2 of transformers, for its logits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
            other = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
            self.model = GPT2LMHeadModel(GPT2Config(**sizes, **other))

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=numbers).logits
            return logits

    return Logits()


NETS["gpt2 of transformers, 4"] = (gpt2, lambda: torch.randint(512, (4, 64)))


def micro_batches(
    model: nn.Module, samples: list[torch.Tensor], known: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """The peak of each micro-batch, and the sums of gradients."""
    peaks = []
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    for sample in samples:
        held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        tracker = StorageTracker(
            [*model.parameters(), *model.buffers(), sample, *known, *held], allocator="none"
        )
        with tracker:
            out = model(sample)
        output_gradient = torch.ones_like(out)
        tracker.meet(output_gradient)
        with tracker:
            out.backward(output_gradient)
        del out, output_gradient, held
        peaks.append(tracker.peak_bytes)
    return peaks, [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def seconds(model: nn.Module, sample: torch.Tensor) -> float:
    """The least of some micro-batches that find gradients."""
    least = float("inf")
    for _ in range(STEPS):
        began = time.process_time()
        model(sample).sum().backward()
        least = min(least, time.process_time() - began)
    return least


def rows(name: str) -> list[dict[str, Any]]:
    """Plain, planned for what torch takes, and for less."""
    make, sample_of = NETS[name]
    model, samples = make(), [sample_of() for _ in range(MICRO_BATCHES)]
    own = copy.deepcopy(model)
    peaks, expected = micro_batches(own, samples, [])
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    row = {"network": name, "way": "plain", "gradients": gradients, "predicted": None}
    measured: list[dict[str, Any]] = [
        {**row, "first": peaks[0], "later": max(peaks[1:]), "seconds": seconds(own, samples[0])}
    ]
    for way, budget in budgets(model, samples[0]).items():
        planned = plan(copy.deepcopy(model), samples[0], budget, profile=False, time_limit_s=10.0)
        record = planned.sn_memory
        # The second step finds gradients, and is planned for them.
        micro_batches(planned, samples[:2], [])
        (first,) = record.steps.values()
        # Where there is room for gradients beside its plan, it has no other.
        later = record.inputs.later.get(first, first)
        first_gradients = gradients if later is first else 0
        peaks, sums = micro_batches(planned, samples, [*first.known, *later.known])
        measured.append(
            {
                **row,
                "way": way,
                "budget": later.plan.budget_bytes,
                "predicted first": first.plan.peak_bytes,
                "predicted": later.plan.peak_bytes + first_gradients,
                "first": peaks[0],
                "later": max(peaks[1:]),
                "equal": all(map(torch.equal, sums, expected)),
                "overhead": later.plan.overhead,
                "seconds": seconds(planned, samples[0]),
            }
        )
    return measured


def budgets(model: nn.Module, sample: torch.Tensor) -> dict[str, int]:
    """The unplanned peak with gradients in place; halfway from there to the smallest found."""
    traced = trace(model, sample, profile=False, accumulate=True)
    try:
        smallest = plan_graph(traced.graph, 0, time_limit_s=10.0).peak_bytes
    except BudgetError as error:
        smallest = error.peak_bytes
    less = (peak(traced.graph).bytes + smallest) // 2
    return {"plan": unplanned_bytes(traced.graph), "plan for less": less}


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=NETS, default=list(NETS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = [row for name in args.models for row in rows(name)]
    for row in table:
        sizes = [row["gradients"], row.get("budget"), row.get("predicted first"), row["first"]]
        sizes += [row["predicted"], row["later"]]
        cells = ["" if size is None else f"{size / 1024:,.0f}" for size in sizes]
        sums = {True: "equal", False: "differ", None: ""}[row.get("equal")]
        cells = [row["network"], row["way"], *cells, sums, f"{row['seconds'] * 1000:.1f}"]
        print("| " + " | ".join(cells) + " |")
    save(args.json, origin() | {"rows": table})


if __name__ == "__main__":
    main()
