"""In which kernels a step spends its time: torch's profile, and Nsight Compute's.

The text of both is kept beside the JSON. On the CPU the profile is that of ops, and no text is
worth keeping.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resnet50_gradients import OURS, gradient
from torch import profiler

from gpu.exchange_ranks import Way, shapes_of
from gpu.section import Section, main, run

SLOWEST = 3
ALONE = "--alone"  # run the steps, nothing else: for ncu to watch


def way_of(name: str, device: str) -> Way:
    """A settled way over the shapes of ResNet-50."""
    shapes = shapes_of("gpt2/12" if device == "cpu" else "resnet50")
    gradients = [gradient(shape, seed, 0, device) for seed, shape in enumerate(shapes)]
    return Way(name, {"device": device}, gradients)


def seconds_of(event: Any, device: str) -> float:
    """Of an event itself, on the device."""
    spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
    return float(spent) * 1e-6


def profiled(section: Section, name: str) -> list[str]:
    """Rows of the slowest kernels of a way; their names."""
    way = way_of(name, section.device)
    backward = way.backward()
    way.settle()
    with profiler.profile() as seen:
        backward()
        way.settle()
    events = [event for event in seen.key_averages() if seconds_of(event, section.device) > 0]
    if section.device == "cuda":
        events = [event for event in events if str(event.device_type).endswith("CUDA")]
    events.sort(key=lambda event: -seconds_of(event, section.device))
    total = sum(seconds_of(event, section.device) for event in events)
    for event in events[:SLOWEST]:
        spent = seconds_of(event, section.device)
        section.row(
            way=name, kernel=event.key[:160], calls=event.count, ms=1e3 * spent, share=spent / total
        )
    if section.path and not section.dry:
        sort = f"self_{section.device}_time_total"
        text = seen.key_averages().table(sort_by=sort, row_limit=25, max_name_column_width=90)
        file = section.path.with_name(f"profile_{name.replace(' ', '_')}.txt")
        file.write_text(text + "\n", encoding="utf-8")
    return [event.key for event in events[:SLOWEST]]


def counted(section: Section) -> None:
    """Nsight Compute over the kernels of one step of FFTCompression, the first few of each."""
    command = ["ncu", "--clock-control", "none", "--set", "basic", "--launch-count", "12"]
    command += ["--launch-skip", "400", sys.executable, "-m", "gpu.slowest_kernels", ALONE]
    code, output = run(command, timeout_s=max(5.0, section.left_s() - 1), keep=60_000)
    if code or "LibraryNotLoaded" in output:
        section.leave_out("Nsight Compute", f"ended with {code}: {output[-200:]}")
    elif section.path:
        section.path.with_name("profile_ncu.txt").write_text(output, encoding="utf-8")


def alone(device: str, what: Any) -> None:
    """Do something in a group of this process only."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        options = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
        dist.init_process_group(
            backend, init_method=f"file://{Path(folder, 'meet')}", rank=0, world_size=1, **options
        )
        what()
        dist.destroy_process_group()


def measure(section: Section) -> None:
    """Both exchanges, then Nsight Compute."""

    def all_ways() -> None:
        for name in (OURS, "gather"):
            section.part(name, lambda name=name: profiled(section, name), least_s=2)

    alone(section.device, all_ways)
    if section.dry:
        section.leave_out("Nsight Compute", "it watches a GPU")
    elif not shutil.which("ncu"):
        section.leave_out("Nsight Compute", "ncu is not on the PATH")
    else:
        section.part("Nsight Compute", lambda: counted(section), least_s=8)


if __name__ == "__main__":
    if ALONE in sys.argv:
        alone("cuda", lambda: way_of("gather", "cuda").step())
    else:
        main("slowest_kernels", measure)
