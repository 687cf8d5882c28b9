"""Networks that train, with a plan, under a hard limit in which plain runs out of memory.

    python -m benchmarks hard_limits [--trials 2] [--json FILE] [--nets NAME ...] [--scratch MIB]
                                     [--cgroup FOLDER]

Each trial is a separate process. It imports, makes a network and a sample, records what it holds
(base), plans at 70 % (or the smallest feasible budget above), sets the limit to base, less the
parts of the step that exist already, plus budget, plus `process_bytes`, plus --scratch; then it
trains 20 steps. The limit is RLIMIT_DATA. `plain` trains under the limit of the network's planned
trial, without planning. FOLDER is a cgroup (v1 or v2) that the caller made and may write to: the
trial starts in it, and the limit is set there, beyond what it then holds (resident pages). Rows in
FILE are kept; more --trials add to them.
"""

from __future__ import annotations

import json
import os
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from limited_nets import NETS, build
from machine import origin
from process_bytes import held_bytes, warm
from rows_file import flags, load, matching, save
from trials import Watch, fresh, last_row, starved, status

import sn_memory.torch
from sn_memory import BudgetError

ROOT = Path(__file__).resolve().parent.parent
STEPS = 20
_MOST = "memory.peak", "memory.max_usage_in_bytes"


def file_of(cgroup: str, new: str, old: str) -> Path:
    """A file of a cgroup: by its name in version 2, else by that in version 1."""
    path = Path(cgroup, new)
    return path if path.exists() else Path(cgroup, old)


def held(cgroup: str) -> int:
    """What the kernel counts of this process: VmData, or what is resident in its cgroup."""
    if not cgroup:
        return status()["VmData"]
    return int(file_of(cgroup, "memory.current", "memory.usage_in_bytes").read_text())


def limit(most: int | None, cgroup: str) -> None:
    """Let the kernel refuse what is beyond; None lifts the limit of a cgroup."""
    if not cgroup:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return
    file = file_of(cgroup, "memory.max", "memory.limit_in_bytes")
    none = "max" if file.name == "memory.max" else "-1"
    file.write_text(none if most is None else str(most))
    # From here on; of version 2 a kernel may not let it be set back.
    with suppress(OSError):
        file_of(cgroup, *_MOST).write_text("0")


def trial(asked: dict[str, Any]) -> dict[str, Any]:
    """Train in this process."""
    warm()
    model, sample = build(asked["net"])
    resident = held_bytes(model, sample)
    base = held(asked["cgroup"])
    row: dict[str, Any] = {"base_bytes": base, "there_bytes": resident}
    run = model
    if asked["way"] == "planned":
        try:
            run = sn_memory.torch.plan(model, sample, "70%")
        except BudgetError as error:
            run = sn_memory.torch.plan(model, sample, error.peak_bytes)
        record = run.sn_memory
        row |= {
            "budget_bytes": record.budget_bytes, "process_bytes": record.process_bytes,
            "peak_bytes": record.plan.peak_bytes, "plain_bytes": record.plan.baseline_peak_bytes,
        }  # fmt: skip
        row["limit_bytes"] = record.budget_bytes - resident + record.process_bytes
        row["limit_bytes"] += asked["scratch_bytes"]
    else:
        row["limit_bytes"] = asked["limit_bytes"]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    watch = Watch()
    limit(base + row["limit_bytes"], asked["cgroup"])
    steps, began = 0, time.perf_counter()
    try:
        for _ in range(STEPS):
            run(sample).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    except (MemoryError, RuntimeError) as error:
        if not starved(f"{type(error).__name__}: {error}"):
            raise
        row["error"] = str(error).splitlines()[0][:160]
    row |= {"steps": steps, "step_s": (time.perf_counter() - began) / max(steps, 1)}
    most = watch.end()["VmData"]
    # Of a cgroup the kernel has counted it.
    row["most_bytes"] = (most_in(asked["cgroup"]) if asked["cgroup"] else most) - base
    return row


def most_in(cgroup: str) -> int:
    """The most that a cgroup held since its limit was lifted."""
    return int(file_of(cgroup, *_MOST).read_text())


def run_trial(asked: dict[str, Any]) -> dict[str, Any]:
    """Run a trial in a process of its own, from its first page on in the cgroup."""
    limit(None, asked["cgroup"])
    procs = Path(asked["cgroup"], "cgroup.procs")
    enter = (lambda: procs.write_text(str(os.getpid()))) if asked["cgroup"] else None
    env = {"SN_MEMORY_MALLOC": "on", "OMP_NUM_THREADS": "1"}
    done = fresh(__file__, "--one", json.dumps(asked), env=env, enter=enter)
    if done.returncode == 0:
        return asked | last_row(done)
    # Where memory runs out inside a library, or the cgroup kills, there may be no exception.
    if done.returncode > 0 and not starved(done.stderr):
        raise SystemExit(f"the trial {asked} failed:\n{done.stderr[-2000:]}")
    return asked | {"steps": 0, "error": f"ended with {done.returncode}"}


def main() -> None:
    """Run the trials that are missing."""
    parser = flags(__doc__, ROOT / "benchmarks/results/hard_limits.json")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--scratch", type=int, default=0, help="MiB added for kernels' scratch")
    parser.add_argument("--cgroup", default="", help="a folder under /sys/fs/cgroup to use")
    parser.add_argument("--one", type=json.loads, help="run this trial in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(trial(args.one)), flush=True)
        return
    for number in range(args.trials):
        for name in args.nets:
            for way in ("planned", "plain"):
                asked = {
                    "net": name, "way": way, "trial": number, "cgroup": args.cgroup,
                    "scratch_bytes": args.scratch << 20,
                }  # fmt: skip
                rows = load(args.json)
                if matching(rows, asked):
                    continue
                if way == "plain":
                    ours = matching(rows, asked | {"way": "planned"})
                    if ours is None or "limit_bytes" not in ours:
                        continue
                    asked["limit_bytes"] = ours["limit_bytes"]
                row = run_trial(asked) | origin()
                save(args.json, [*rows, row])
                mib = {key: round(row[key] / 2**20) for key in row if key.endswith("_bytes")}
                end = row.get("error", "")
                print(f"{name} {way}: {row['steps']} steps of {STEPS}, {mib} {end}", flush=True)


if __name__ == "__main__":
    main()
