"""Sequences of eight lengths in shuffled order: peaks, searches and seconds of new lengths.

    python -m benchmarks new_inputs [--json FILE] [--large]

A small GPT-2 of transformers is trained for sixty steps on made-up tokens, plainly and with plans
for the shortest and the longest length, or the longest alone. Losses, the last gradients and
weights are compared; peaks are of live storages (StorageTracker). With `--large`, GPT-2 of 124
million parameters meets each length once. Seconds are of the clock, one thread.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import torch
import transformers
from machine import origin
from rows_file import flags, save

from sn_memory.torch import StorageTracker, plan

LENGTHS = (64, 96, 128, 160, 192, 208, 232, 256)
STEPS = 60
SIZES: dict[str, dict[str, int]] = {
    "small": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512},
    "large": {},
}


def gpt2(size: str) -> Any:
    """Return a GPT-2 of this size, from a fixed state of chance."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_positions=256, use_cache=False, bos_token_id=0, eos_token_id=1, **SIZES[size]
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config).train()


def batch(length: int, seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """Return made-up tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def trained(model: Any) -> dict[str, Any]:
    """Train for an epoch; return losses, last gradients, weights, peaks and seconds of steps."""
    order = [LENGTHS[step % len(LENGTHS)] for step in range(STEPS)]
    random.Random(0).shuffle(order)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, peaks = [], []
    began = time.perf_counter()
    for step, length in enumerate(order):
        optimizer.zero_grad()
        inputs = batch(length, step)
        with StorageTracker([*model.parameters(), *inputs.values()]) as tracker:
            loss = model(**inputs).loss
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
        peaks.append(tracker.peak_bytes)
    weights = [parameter.detach() for parameter in model.parameters()]
    seconds = time.perf_counter() - began
    return {
        "losses": losses,
        "tensors": [*gradients, *weights],
        "peaks": peaks,
        "seconds": seconds,
    }


def rows_of(record: Any) -> list[dict[str, Any]]:
    """Return what a planned model says of its kinds of input."""
    return [
        {
            "inputs": kind.inputs,
            "how": kind.how,
            "peak": kind.peak_bytes,
            "seconds": round(kind.seconds, 3),
        }
        for kind in record.kinds
    ]


def epoch(name: str, lengths: tuple[int, ...], plain: dict[str, Any]) -> dict[str, Any]:
    """Train with plans for these lengths and compare."""
    sample = [batch(length, 0) for length in lengths]
    model = plan(gpt2("small"), sample, "60%", profile=False, time_limit_s=10)
    measured = trained(model)
    return {
        "sample": name,
        "budget": model.sn_memory.budget_bytes,
        "most": max(measured["peaks"]),
        "plain": max(plain["peaks"]),
        "searched": sum(kind.how.startswith("planned") for kind in model.sn_memory.kinds),
        "equal": measured["losses"] == plain["losses"]
        and all(map(torch.equal, measured["tensors"], plain["tensors"])),
        "at_sight_s": round(model.sn_memory.inputs.time.planning_s, 2),
        "seconds": round(measured["seconds"], 1),
        "plain_s": round(plain["seconds"], 1),
        "kinds": rows_of(model.sn_memory),
    }


def large() -> dict[str, Any]:
    """GPT-2 as it is, two rows, each length once."""
    began = time.perf_counter()
    model = plan(gpt2("large"), batch(256, 0, 2), "70%", profile=False, time_limit_s=20)
    planned_s = time.perf_counter() - began
    for length in LENGTHS:
        model(**batch(length, 1, 2))
    return {
        "budget": model.sn_memory.budget_bytes,
        "planned_s": round(planned_s, 1),
        "calls": len(model.sn_memory.trace.graph.ops),
        "kinds": rows_of(model.sn_memory),
    }


def main() -> None:
    """Print what was found, and write it to a file if asked."""
    parser = flags(__doc__)
    parser.add_argument("--large", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    plain = trained(gpt2("small"))
    result: dict[str, Any] = {
        "command": "python -m benchmarks new_inputs --large",
        **origin(),
        "epochs": [
            epoch("shortest and longest", (64, 256), plain),
            epoch("longest", (256,), plain),
        ],
    }
    if wanted.large:
        result["large"] = large()
    save(wanted.json, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
