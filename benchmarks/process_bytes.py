"""What a process takes beyond the tensors of a planned step, by RLIMIT_DATA's count (VmData).

    python -m benchmarks process_bytes [--json FILE] [--nets NAME ...] [--malloc on off]

Each network is planned at 80 % and trains eight steps in a process of its own. What planning
imports is there before, by a toy's plan. `kept` is what is held after the plan and between steps,
beyond what was held before: plan objects, code that oneDNN made, the heap's holes. `beyond` is the
most in a step, over that and over the tensors of the plan: scratch of kernels. `objects` is what
Python holds of the plan, by tracemalloc. Rows in FILE are kept, so a run that was cut off goes on.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from limited_nets import NETS, build
from machine import origin
from rows_file import flags, load, matching, save
from torch import nn
from trials import Watch, fresh, last_row, status

import sn_memory.torch

ROOT = Path(__file__).resolve().parent.parent
STEPS = 8


def warm() -> None:
    """Have everything there that a first plan and a first update import."""
    import scipy.optimize
    import sympy

    assert all((scipy.optimize.linprog, sympy.Symbol))
    torch.set_num_threads(1)
    toy = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sn_memory.torch.plan(toy, torch.ones(4, 4), "100%")(torch.ones(4, 4)).sum().backward()
    torch.optim.SGD(toy.parameters(), 1e-4).step()


def held_bytes(model: nn.Module, sample: torch.Tensor) -> int:
    """Of what a plan counts, what is there before a step."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), sample))


def row_of(name: str) -> dict[str, Any]:
    """Plan and train one network, and count."""
    warm()
    model, sample = build(name)
    base = status()["VmData"]
    planned = sn_memory.torch.plan(model, sample, "80%")
    plan, calls = planned.sn_memory.plan, len(planned.sn_memory.trace.graph.ops)
    after = status()["VmData"]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    watch, began = Watch(), time.perf_counter()
    for _ in range(STEPS):
        planned(sample).backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - began) / STEPS
    most, between = watch.end()["VmData"], status()["VmData"]
    kept = max(after, between) - base
    tensors = plan.peak_bytes - held_bytes(model, sample)
    del planned
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    planned = sn_memory.torch.plan(model, sample, "80%", profile=False)
    gc.collect()
    objects = tracemalloc.get_traced_memory()[0] - before
    del planned
    return {
        "net": name, "calls": calls, "peak_bytes": plan.peak_bytes, "kept_bytes": kept,
        "beyond_bytes": most - base - kept - tensors, "objects_bytes": objects,
        "step_s": seconds,
    }  # fmt: skip


def main() -> None:
    """Make the rows that are missing."""
    parser = flags(__doc__, ROOT / "benchmarks/results/process_bytes.json")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--malloc", nargs="+", default=["on", "off"])
    parser.add_argument("--one", help="run this network in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(row_of(args.one)), flush=True)
        return
    for name in args.nets:
        for malloc in args.malloc:
            rows = load(args.json)
            if matching(rows, {"net": name, "malloc": malloc}):
                continue
            done = fresh(__file__, "--one", name, env={"SN_MEMORY_MALLOC": malloc})
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            row = last_row(done) | {"malloc": malloc, **origin()}
            save(args.json, [*rows, row])
            mib = {key: round(row[key] / 2**20, 1) for key in row if key.endswith("_bytes")}
            print(f"{name}, malloc {malloc}: {row['calls']} calls, {mib}", flush=True)


if __name__ == "__main__":
    main()
