"""Architectures of other people's libraries under a plan: right, or refused with a reason.

    python benchmarks/planner_architectures.py [--json FILE] [--only NAME ...] [--quick]

Each network of architectures.py, in a process of its own, is planned for a share of its activation
memory: parameters, gradients, buffers and input, and SHARE of what the model's own step holds
beside them. Then it is trained one step, with the plan and without, from the same state on other
values than the sample's: loss and gradients are compared bit by bit. `sn_memory.torch.verify` gives
the peaks. `chosen` is what carries the plan out; `refused` means that `plan` raised, and
`reason` is what it said; `crashed` that the process ended otherwise. `--quick` plans for a second,
without timing ops. All on one thread of the CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy import save
from architectures import ARCHITECTURES, Sample, loss_of
from machine import commit, machine

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.base.errors import PlanWarning
from sn_memory.torch.model.compare import differences
from sn_memory.torch.model.step import put_back, run_step

ROOT = Path(__file__).resolve().parent.parent
SHARE = 0.7
LIMIT_S = 600


def seed(number: int) -> None:
    """Seed all that models draw from."""
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - the generator that models of transformers draw from
    random.seed(number)


def trained(model: torch.nn.Module, sample: Sample) -> dict[str, torch.Tensor | None]:
    """Train one step as users do; return the loss, the gradients and the buffers."""
    model.zero_grad(set_to_none=True)
    seed(2)
    loss = loss_of(model(**sample))
    loss.backward()
    found: dict[str, torch.Tensor | None] = {"loss": loss.detach()}
    found |= {f"gradient of {name}": it.grad for name, it in model.named_parameters()}
    return found | {f"buffer {name}": it.clone() for name, it in model.named_buffers()}


def budget_of(model: torch.nn.Module, sample: Sample, share: float) -> tuple[int, int]:
    """Return the peak of the model's own step, and SHARE of its activations with all the rest."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [it for it in sample.values() if isinstance(it, torch.Tensor)]
    fixed = sum(it.nbytes for it in tensors)
    fixed += sum(it.nbytes for it in model.parameters() if it.requires_grad)
    with put_back(model, sample):
        whole = run_step(model, model, ((), sample), loss=loss_of).peak_bytes
    return whole, fixed + int(share * (whole - fixed))


def row_of(name: str, *, share: float = SHARE, **settings: Any) -> dict[str, Any]:
    """Plan an architecture and train a step of it; return the row of the table."""
    seed(0)
    model, sample = ARCHITECTURES[name].model(), ARCHITECTURES[name].sample()
    whole, budget = budget_of(model, sample, share)
    row = {"architecture": name, "share": share, "plain_bytes": whole, "budget_bytes": budget}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PlanWarning)
        try:
            planned = sn_memory.torch.plan(model, sample, budget, **settings)
        except (BudgetError, sn_memory.torch.TraceError) as error:
            reasons = [*_plan_warnings(said), f"{type(error).__name__}: {error}"]
            return row | {"chosen": "refused", "reason": _short(" ".join(reasons))}
        verified = sn_memory.torch.verify(planned, sample, loss=loss_of)
        other, state = ARCHITECTURES[name].sample(), copy.deepcopy(model.state_dict())
        expected = trained(model, other)
        model.load_state_dict(state)
        different = differences(expected, trained(planned, other))
    return row | {
        "chosen": planned.sn_memory.backend,
        "predicted_bytes": verified.predicted_peak_bytes,
        "measured_bytes": verified.measured_peak_bytes,
        "different": len(different),
        "of": len(expected),
        "difference": max(different.values(), default=0.0),
        "reason": _short(" ".join(_plan_warnings(said))),
    }


def _plan_warnings(said: list[warnings.WarningMessage]) -> list[str]:
    return [str(it.message) for it in said if issubclass(it.category, PlanWarning)]


def _short(text: str) -> str:
    """Leave out where libraries are installed."""
    return re.sub(r"[^\s(]*site-packages/", "", " ".join(text.split()))


def in_a_process(name: str, quick: bool) -> dict[str, Any]:
    """Return the row of an architecture, made in a process of its own."""
    command = [sys.executable, __file__, "--row", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"the process ended with {done.returncode}: {last}"
        return {"architecture": name, "share": SHARE, "chosen": "crashed", "reason": reason}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    head = "architecture | by | own, KiB | budget | predicted | measured | differ | at most"
    lines = [f"| {head} |", "| --- " * 8 + "|"]
    for row in rows:
        cells = [row["architecture"], row["chosen"]]
        sizes = (row.get(f"{it}_bytes") for it in ("plain", "budget", "predicted", "measured"))
        cells += ["" if it is None else f"{it / 1024:,.0f}" for it in sizes]
        differ = f"{row['different']} of {row['of']}" if "of" in row else ""
        cells += [differ, f"{row['difference']:.0e}" if row.get("different") else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line; make the rows, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = ROOT / "benchmarks" / "results" / "planner_architectures.json"
    parser.add_argument("--json", type=Path, default=default)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--row", choices=list(ARCHITECTURES), help="this row alone, as JSON")
    args = parser.parse_args()
    if args.row:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        quick = {"profile": False, "time_limit_s": 1.0} if args.quick else {"time_limit_s": 10.0}
        print(json.dumps(row_of(args.row, **quick)))
        return
    about = {"commit": commit(), "machine": machine(), "torch": torch.__version__}
    rows = []
    for name in args.only or ARCHITECTURES:
        rows.append(in_a_process(name, args.quick) | about)
        print(table(rows[-1:]).splitlines()[-1], rows[-1]["reason"][:300], flush=True)
        save(args.json, rows)


if __name__ == "__main__":
    main()
