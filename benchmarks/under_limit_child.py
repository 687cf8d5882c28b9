"""One trial of under_limit.py: a process that trains a few steps and may hold no more than so much.

    python benchmarks/under_limit_child.py '{"task": "resnet", "way": "plain", "size": 6, ...}'

First everything that any way needs is imported, so that all begin alike; then the kernel is told
the limit, RLIMIT_DATA at what is there plus so many bytes. It counts private writable memory, if it
is used or not, thus at least what is resident of it; planning, the planner's own objects and
the arithmetic of the step all happen below it. An allocation beyond fails. Prints a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from resident import Watch, status

# Tasks, and the module that has their ways.
MODULES = {
    "resnet": "under_limit_torch",
    "gpt2": "under_limit_torch",
    "resnet_tensorflow": "under_limit_tensorflow",
}


def restart_high_water() -> None:
    """Let VmHWM start anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


# What libraries say where an allocation failed; oneDNN cannot make the code of a kernel then.
STARVED = (
    "allocate memory", "bad_alloc", "MemoryError", "OOM when allocating", "Out of memory",
    "could not create a primitive", "RESOURCE_EXHAUSTED", "Resource temporarily unavailable",
)  # fmt: skip


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    return isinstance(error, MemoryError) or any(message in str(error) for message in STARVED)


def trial(asked: dict[str, Any]) -> dict[str, Any]:
    """Train as asked for; what it took, or why it did not."""
    module = importlib.import_module(MODULES[asked["task"]])
    module.load()
    base = status()
    restart_high_water()
    if asked["limit_bytes"]:
        most = base["VmData"] + asked["limit_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch = Watch() if asked["way"] == "ours_state" else None
    result: dict[str, Any] = {"trained": False, "base_bytes": base["VmData"], "steps_cpu_s": []}
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
        result["out_of_memory"] = ran_out(error)
        if not result["out_of_memory"] and not module.refuses(error):
            traceback.print_exc()
            raise
    result["resident_bytes"] = status()["VmHWM"] - base["VmRSS"]
    if watch is not None:
        most = watch.end()
        result["anonymous_bytes"] = most["RssAnon"] - base["RssAnon"]
        result["mapped_bytes"] = most["RssFile"] - base["RssFile"]
    return result


if __name__ == "__main__":
    print(json.dumps(trial(json.loads(sys.argv[1]))), flush=True)
