"""Test and measure everything on a GPU: `make gpu`, and `make gpu-dry` on the CPU.

    PYTHONPATH=.:benchmarks python -m gpu.runner [--device cpu] [--minutes 10] [--out DIR]
                                [--wheels DIR] [--required 0] [--no-build] [--sections NAME ...]
                                [--without NAME ...]

Needs only the standard library, to say what is missing: torch, a device, a compiler. Each section
(sections.py) is a separate program with a share of the time; unused time goes to the next ones.
It writes DIR/NAME.json as it goes; one that fails or runs out of time does not stop the next ones.

Exit status: 0 for success; 1 if a section failed or ran out of time; 3 if there is no CUDA
device, 0 with --required 0; 4 if all ran and a figure missed its target.

array-api-compat, which the project needs, is taken from SciPy's own copy if it is not installed,
and Horovod likewise from wheels in .cache/gpu-wheels (lent.py). On the CPU, TensorFlow, Keras,
Horovod, CuPy and array-api-compat are hidden, as on a bare GPU machine:
`absent/sitecustomize.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from machine import ROOT

from gpu.lent import lend_array_api_compat, lend_horovod
from gpu.section import CANNOT, run, write
from gpu.sections import SECTIONS, Plan

HERE = Path(__file__).resolve().parent
ABSENT = ("tensorflow", "keras", "horovod", "cupy", "cupyx")
LEAST_S = 5.0
FIND_DEVICE = """
import json, sys
try:
    import torch
except ImportError as missing:
    sys.exit(f"no torch: {missing}")
if not torch.cuda.is_available():
    sys.exit(f"no CUDA device (torch {torch.__version__})")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
"""


def environment(device: str, folder: Path, wheels: Path) -> dict[str, str]:
    """Variables of the sections; `folder` is for what may be lent, of `wheels` or of SciPy."""
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    if device == "cpu" or importlib.util.find_spec("array_api_compat") is None:
        if lend_array_api_compat(folder):
            paths.insert(0, str(folder))
        else:
            print("array-api-compat: neither installed nor in SciPy; most sections will fail")
    env = {"PYTHONUNBUFFERED": "1"}
    if device == "cuda":
        unpacked = folder / "wheels"
        unpacked.mkdir()
        print(lend_horovod(wheels, unpacked))
        # Last: what is lent for Horovod hides nothing of the project's.
        paths.append(str(unpacked))
    if device == "cpu":
        paths.insert(0, str(HERE / "absent"))
        env |= {"SN_ABSENT": ",".join(ABSENT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    inherited = os.environ.get("PYTHONPATH")
    return env | {"PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}


def build_extension(timeout_s: float) -> str:
    """Compile the C++ in place with what is there; how it went."""
    if importlib.util.find_spec("setuptools") is None:
        return "C++ extensions: not built, setuptools is not installed; sn_memory plans nothing"
    began = time.monotonic()
    code, output = run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], timeout_s=timeout_s
    )
    took = f"{time.monotonic() - began:.0f} s"
    if code or "was not built" in output:
        return f"C++ extensions: not built after {took}:\n{output[-1500:]}"
    return f"C++ extensions: built in place, {took}"


def run_section(plan: Plan, device: str, out: Path, seconds: float) -> dict[str, Any]:
    """Run one to its end or that of its time; its file as it is then."""
    path = out / f"{plan.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"gpu.{plan.name}", "--device", device]
    command += ["--json", str(path), "--seconds", f"{seconds:.0f}"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(seconds)
        state, why = ("ok", "") if code == 0 else ("failed", f"exit status {code}")
    except subprocess.TimeoutExpired:
        code, state, why = 124, "failed", f"time was up after {seconds:.0f} s"
    finally:
        # Its ranks and tools with it: they are of its session.
        end_session(process)
    result: dict[str, Any] = {"section": plan.name, "rows": [], "targets": [], "left_out": []}
    if path.is_file():
        result |= json.loads(path.read_text(encoding="utf-8"))
    if code != CANNOT:
        result |= {"state": state, "why": why}
    result["seconds"] = round(time.monotonic() - began, 1)
    write(path, result)
    return result


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of all that it started."""
    with suppress(ProcessLookupError):  # all may have ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(results: Sequence[dict[str, Any]]) -> str:
    """How all sections ended."""
    lines = [f"\n{'section':17} {'state':7} {'s':>6} {'rows':>5} {'targets':>8}  why"]
    for result in results:
        met = sum(target["met"] for target in result["targets"])
        targets = f"{met}/{len(result['targets'])}" if result["targets"] else "-"
        lines.append(
            f"{result['section']:17} {result['state']:7} {result['seconds']:6.1f} "
            f"{len(result['rows']):5} {targets:>8}  {result['why']}"
        )
        lines += [f"{'':17} left out: {no['what']}: {no['why']}" for no in result["left_out"]]
        lines += [
            f"{'':17} missed: {no['what']}: {no['value']:.3g}, asked {no['asked']}"
            for no in result["targets"]
            if not no["met"]
        ]
    return "\n".join(lines)


def status(results: Sequence[dict[str, Any]]) -> int:
    """The exit status that results make."""
    if any(result["state"] not in ("ok", "cannot") for result in results):
        return 1
    missed = any(not target["met"] for result in results for target in result["targets"])
    return 4 if missed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [plan.name for plan in SECTIONS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / ".cache/gpu-wheels", help="folder of Horovod's wheels"
    )
    parser.add_argument(
        "--required", type=int, choices=(0, 1), default=1, help="0: no failure without a GPU"
    )
    parser.add_argument("--no-build", action="store_true", help="the C++ is already built")
    parser.add_argument("--sections", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--without", nargs="+", choices=names, default=[], help="leave these sections out"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections, print the table, return the exit status."""
    args = parse(argv)
    ends = time.monotonic() + 60 * args.minutes
    wanted = [plan for plan in SECTIONS if plan.name in {*args.sections} - {*args.without}]
    if args.device == "cuda":
        code, output = run([sys.executable, "-c", FIND_DEVICE], timeout_s=120)
        if code:
            why = output.strip().splitlines()[-1] if output.strip() else "torch crashed"
            for plan in wanted:
                print(f"{plan.name:17} {why if 'no CUDA' in why else f'no CUDA device: {why}'}")
            return 3 if args.required else 0
        print(output.strip())
    with tempfile.TemporaryDirectory() as lent:
        os.environ.update(environment(args.device, Path(lent), args.wheels.resolve()))
        if args.device == "cuda" and not args.no_build:
            print(build_extension(ends - time.monotonic()), flush=True)
        results = []
        for at, plan in enumerate(wanted):
            part = plan.share / sum(other.share for other in wanted[at:])
            # Sizes are small there, and what is slow is the machine: only the whole has a limit.
            part = 1.0 if args.device == "cpu" else part
            seconds = max(LEAST_S, part * (ends - time.monotonic()))
            print(f"\n== {plan.name}: {plan.what} ({seconds:.0f} s)", flush=True)
            results.append(run_section(plan, args.device, args.out.resolve(), seconds))
    print(table(results))
    return status(results)


if __name__ == "__main__":
    sys.exit(main())
