"""How deep, and how long: what each way trains under one hard memory limit, measured.

    python -m benchmarks under_limit [--task T ...] [--way W ...] [--limit MIB] [--update early|end]
                                     [--start N] [--grain G] [--steps S] [--json FILE]

Each trial is a separate process whose private writable memory the kernel limits (RLIMIT_DATA).
The size is doubled from `--start` until a trial fails, then bisected until the next size is within
a fraction `--grain` of the largest that trained. Trials in the file are not run again, so a
stopped search resumes. Sizes: blocks of a ResNet's third stage by SuperNeurons'
rule (6, 32, n, 6), tokens of a GPT-2. `--at N ...` runs only these sizes, for their seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from machine import origin
from rows_file import flags, load, matching, save
from trials import Watch, fresh, last_row, restart_high_water, starved, status

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "under_limit.json"
Row = dict[str, Any]
WAYS = {
    "resnet": ("plain", "checkpoint", "checkpoint_sqrt", "ours", "ours_state"),
    "gpt2": ("plain", "checkpoint", "ours"),
    "resnet_tensorflow": ("plain", "ours"),
}
# The module that has the ways of a task.
MODULES = {
    "resnet": "under_limit_torch",
    "gpt2": "under_limit_torch",
    "resnet_tensorflow": "under_limit_tensorflow",
}
KEYS = ("task", "way", "update", "limit_bytes", "size")
STEP = {"resnet": 1, "gpt2": 16, "resnet_tensorflow": 1}
# What ours leaves of the limit for what is no storage: objects of Python for each op, scratch of
# kernels, ends of pages. Bytes, and bytes for each unit of the size.
MARGIN = {
    "resnet": (100 << 20, 180 << 10),
    "ours_state": (100 << 20, 264 << 10),
    "gpt2": (96 << 20, 0),
    "resnet_tensorflow": (560 << 20, 6 << 20),
}
# The same allocator for all: one arena, and each block of 128 KiB and more from the kernel and back
# to it at once, so that what is free counts as free.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def child(asked: Row) -> Row:
    """Train as asked for, in this process; what it took, or why it did not.

    First everything that any way needs is imported, so that all begin alike; then the kernel is
    told the limit, RLIMIT_DATA at what is there plus so many bytes. It counts private writable
    memory, if it is used or not, thus at least what is resident of it; planning, the planner's own
    objects and the arithmetic of the step all happen below it. An allocation beyond fails.
    """
    module = importlib.import_module(MODULES[asked["task"]])
    module.load()
    base = status()
    restart_high_water()
    if asked["limit_bytes"]:
        most = base["VmData"] + asked["limit_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch = Watch() if asked["way"] == "ours_state" else None
    result: Row = {"trained": False, "base_bytes": base["VmData"], "steps_cpu_s": []}
    try:
        began = time.perf_counter(), time.process_time()
        step, about = module.prepared(asked)
        result |= about
        result |= {"prepared_s": time.perf_counter() - began[0]}
        result |= {"prepared_cpu_s": time.process_time() - began[1]}
        result |= {"prepared_peak_bytes": status()["VmHWM"] - base["VmRSS"]}
        losses, wall, cpu = [], [], []
        for _ in range(asked["steps"]):
            began = time.perf_counter(), time.process_time()
            losses.append(step())
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
        result |= {"losses": losses, "steps_s": wall, "steps_cpu_s": cpu, "trained": True}
    except BaseException as error:  # what it is decides the row
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        result["error"] = text
        result["out_of_memory"] = isinstance(error, MemoryError) or starved(str(error))
        if not result["out_of_memory"] and not module.refuses(error):
            traceback.print_exc()
            raise
    result["resident_bytes"] = status()["VmHWM"] - base["VmRSS"]
    if watch is not None:
        most = watch.end()
        result["anonymous_bytes"] = most["RssAnon"] - base["RssAnon"]
        result["mapped_bytes"] = most["RssFile"] - base["RssFile"]
    return result


def trial(asked: Row, *, timeout_s: float) -> Row:
    """Run one trial in a process of its own; its row."""
    fixed, per_unit = MARGIN.get(asked["way"]) or MARGIN[asked["task"]]
    job = asked | {"margin_bytes": asked.get("margin_bytes") or fixed + per_unit * asked["size"]}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = ALLOCATOR | THREADS | QUIET | {"PYTHONPATH": paths}
    done = fresh(__file__, "--child", json.dumps(job), env=env, timeout_s=timeout_s)
    if done.returncode == 0 and done.stdout.strip():
        return job | last_row(done)
    # Where memory runs out inside a library, the process may end without a word.
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode > 0 and not starved(done.stderr):
        raise RuntimeError(f"the trial {job} failed:\n{done.stderr[-2000:]}")
    error = f"ended with {done.returncode}: {last[:160]}"
    return job | {"trained": False, "out_of_memory": True, "error": error, "steps_cpu_s": []}


def describe(row: Row) -> str:
    """One line of a row."""
    what = f"{row['task']} {row['way']} {row['update']} {row['limit_bytes'] >> 20} MiB"
    size = f"{what}: {row['size']}"
    if not row["trained"]:
        return f"{size} did not train: {row.get('error', '')}"
    return (
        f"{size} trained, {min(row['steps_cpu_s']):.2f} CPU s a step, "
        f"{row['resident_bytes'] / 2**20:.0f} MiB resident, prepared in {row['prepared_s']:.0f} s"
    )


def largest(run: Any, start: int, *, grain: float, step: int) -> int:
    """Double from `start`, halve in; the largest size that trained, 0 for none."""
    low, high = 0, start
    while run(high):
        low, high = high, 2 * high
    while high - low > max(step, grain * low):
        middle = (low + high) // 2 // step * step
        if middle <= low:
            break
        low, high = (middle, high) if run(middle) else (low, middle)
    return low


def main(argv: list[str]) -> int:
    """Search, and keep every trial."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--task", nargs="+", choices=WAYS, default=["resnet"])
    parser.add_argument("--way", nargs="+")
    parser.add_argument("--limit", type=int, default=768, help="MiB beyond the imported modules")
    parser.add_argument("--update", choices=("early", "end"), default="early")
    parser.add_argument("--start", type=int, default=64)
    parser.add_argument("--grain", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--at", type=int, nargs="+", help="only these sizes, no search")
    parser.add_argument("--time-limit", type=float, default=20.0, help="plan's time_limit_s")
    parser.add_argument("--planner", default="auto", help="plan's planner")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per trial")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(child(args.child)), flush=True)
        return 0
    for task in args.task:
        for way in args.way or WAYS[task]:

            def run(size: int, task: str = task, way: str = way) -> bool:
                asked = {
                    "task": task, "way": way, "update": args.update, "size": size,
                    "limit_bytes": args.limit << 20, "steps": args.steps,
                    "time_limit_s": args.time_limit,
                    **({"planner": args.planner} if way.startswith("ours") else {}),
                }  # fmt: skip
                row = matching(load(args.json), {key: asked[key] for key in KEYS})
                if row is None:
                    row = trial(asked, timeout_s=args.timeout)
                    row |= origin()
                    save(args.json, [*load(args.json), row])
                print(describe(row), flush=True)
                return bool(row["trained"])

            if args.at:
                for size in args.at:
                    run(size)
                continue
            most = largest(run, args.start, grain=args.grain, step=STEP[task])
            print(f"{task} {way}: {most}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
