"""Bytes that a planned step holds, by the allocator's own events, kernels' scratch included.

    python -m benchmarks held_bytes [--json FILE] [--only NAME ...] [--budgets 60 70 80]
        [--threads 1 2] [--isa default AVX2 AVX512_CORE] [--resume] [--cuda]

Each network of held_nets.py is trained a step without a plan and with plans at shares of its
unplanned peak. `held` is the most that torch's allocator had given out: on the CPU by its events,
on CUDA by its peak statistics. One process a network and setting, as oneDNN reads
ONEDNN_MAX_CPU_ISA when it starts. A refused budget is taken at the fewest percent that the error
names. Prints the table of docs/torch_memory_measured.md.
"""

from __future__ import annotations

import argparse
import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from device_peak import peak_of_step
from held_nets import NETS
from machine import origin
from rows_file import flags, load, save
from tables import markdown
from trials import fresh, last_row

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.torch.model.signature import tensors
from sn_memory.torch.model.step import run_step
from sn_memory.torch.trace.trace import call_arguments

RESULTS = Path(__file__).resolve().parent / "results" / "held_bytes.json"
KEY = ("network", "threads", "isa", "device", "asked")
MIB = 2**20


def held_bytes(
    forward: torch.nn.Module, model: torch.nn.Module, sample: Any, device: torch.device
) -> dict[str, int]:
    """Return the most that the allocator had given out in a step of `forward`, the second one."""
    arguments = call_arguments(sample)
    run_step(forward, forward, arguments, count=False)
    if device.type == "cpu":
        return {"peak_bytes": run_step(forward, forward, arguments, kernels=True).peak_bytes}
    for tensor in (*model.parameters(), *tensors(arguments)):
        tensor.grad = None
    record = getattr(forward, "sn_memory", None)
    kept = (*model.parameters(), *model.buffers(), *tensors(arguments))
    return peak_of_step(
        lambda: run_step(forward, forward, arguments, count=False),
        (*kept, *(record.latest.known if record else ())),
    )


def rows_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """In a process of its own: plan and measure one network at each budget."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    device = torch.device(job["device"])
    model, sample = NETS[job["network"]]()
    model = model.to(device)
    sample = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), sample
    )
    plain = held_bytes(model, model, sample, device)
    rows = []
    with suppress(BudgetError):
        # Ops are timed first, in a plan that needs no search: the limit below would cut that short
        # on a busy machine, and rules would stand in for what kernels take.
        sn_memory.torch.plan(model, sample, "100%", time_limit_s=120.0)
    for asked in job["budgets"]:
        settings: dict[str, Any] = {"time_limit_s": 6.0}
        planned, percent = within(model, sample, asked, settings)
        record = planned.sn_memory
        held = held_bytes(planned, model, sample, device)
        row = {name: job[name] for name in KEY if name != "asked"} | {"asked": asked}
        row |= {
            "percent": percent,
            "backend": record.backend,
            "plain_bytes": plain["peak_bytes"],
            "estimate_bytes": sn_memory.torch.estimate(model, sample).step_bytes,
            "baseline_bytes": record.plan.baseline_peak_bytes,
            "budget_bytes": record.plan.baseline_peak_bytes * percent // 100,
            "promised_bytes": record.plan.peak_bytes,
            "held_bytes": held["peak_bytes"],
        }
        if device.type == "cuda":
            row |= {
                "simulated_reserved_bytes": record.reserved_peak_bytes,
                "reserved_bytes": held["reserved_bytes"],
                "plain_reserved_bytes": plain["reserved_bytes"],
                "beside_bytes": held["beside_bytes"],
            }
        rows.append(row)
    return rows


def within(
    model: torch.nn.Module, sample: Any, asked: int, settings: dict[str, Any]
) -> tuple[torch.nn.Module, int]:
    """Plan at `asked` percent, or at the fewest that refusals name.

    A second back end may refuse what the first one named.
    """
    percent = asked
    while True:
        try:
            return sn_memory.torch.plan(model, sample, f"{percent}%", **settings), percent
        except BudgetError as error:
            if not error.percent or error.percent <= percent:
                raise
            percent = error.percent


def table(rows: list[dict[str, Any]]) -> str:
    """One row a network: over all of its budgets and settings the worst of each."""
    lines = []
    for name in NETS:
        own = [row for row in rows if row["network"] == name]
        if not own:
            continue
        first = own[0]
        over = [100 * (row["held_bytes"] / row["promised_bytes"] - 1) for row in own]
        kept = sum(row["held_bytes"] <= row["budget_bytes"] for row in own)
        worst = max(
            (abs(row[what] / row["plain_bytes"] - 1) * 100, what)
            for row in own
            for what in ("baseline_bytes", "estimate_bytes")
        )
        lines.append(
            [
                name,
                f"{first['plain_bytes'] / MIB:.1f}",
                f"{first['promised_bytes'] / MIB:.1f}",
                f"{first['held_bytes'] / MIB:.1f}",
                f"{min(over):+.2f} to {max(over):+.2f}",
                f"{kept} of {len(own)}",
                f"{worst[0]:.2f} ({worst[1].partition('_')[0]})",
            ]
        )
    heads = [
        "network", "plain, MiB", "promised", "held", "held over promised, %", "within budget",
        "furthest from plain, %",
    ]  # fmt: skip
    return markdown(heads, lines)


def main() -> None:
    """Measure what the arguments ask for, and print the table."""
    parser = flags(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*NETS], default=[*NETS])
    parser.add_argument("--budgets", nargs="+", type=int, default=[60, 70, 80])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--isa", nargs="+", default=["default", "AVX2", "AVX512_CORE"])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        print(json.dumps(rows_of(json.loads(asked.job))))
        return
    rows = load(asked.json) if asked.resume else []
    measured = {tuple(row[name] for name in KEY) for row in rows}
    device = "cuda" if asked.cuda else "cpu"
    for isa in ["default"] if asked.cuda else asked.isa:
        for threads in asked.threads:
            for name in asked.only:
                job = {"network": name, "threads": threads, "isa": isa, "device": device}
                left = [
                    budget
                    for budget in asked.budgets
                    if (name, threads, isa, device, budget) not in measured
                ]
                if not left:
                    continue
                isa_variable = {} if isa == "default" else {"ONEDNN_MAX_CPU_ISA": isa}
                env = {"OMP_NUM_THREADS": str(threads), **isa_variable}
                job |= {"budgets": left}
                done = fresh(__file__, "--job", json.dumps(job), env=env)
                if done.returncode:
                    print(f"{name}, {threads} threads, {isa}: {done.stderr[-2000:]}", flush=True)
                    continue
                rows += [row | origin() for row in last_row(done)]
                last = rows[-1]
                print(
                    f"{name}, {threads} threads, {isa}: plain {last['plain_bytes'] / MIB:.1f}, "
                    f"promised {last['promised_bytes'] / MIB:.1f}, held "
                    f"{last['held_bytes'] / MIB:.1f} MiB",
                    flush=True,
                )
                save(asked.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
