"""Resources of the build of Horovod: compilers, memory, NCCL; and tools pinned by hash."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import horovod_cuda
from horovod_steps import StepError, Steps
from horovod_target import Target, compiler

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# What builds it, by version and SHA-256, so that a build in a year runs the same tools and nothing
# unknown. Wheels only: taking one runs no code of it.
BUILD_PINS: Final = (
    "setuptools==84.2.1"
    " --hash=sha256:ca140b45d5325a9478f880e351484f62fef15f336462e449ca0c03c873d589c2",
    "wheel==0.48.0 --hash=sha256:3217dcc807155e45db462d7ef2431f5ddda0d7273b700d05a67b271ceb1287ab",
    "packaging==26.3"
    " --hash=sha256:d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c",
)
CMAKE_PINS: Final = (
    # Linux on x86-64, then on 64-bit Arm.
    "cmake==4.4.4"
    " --hash=sha256:f773a0544c66370408f451acd487c2c643b0dfebb48c5d64f3638bc1bb820238"
    " --hash=sha256:b3029f586853e01ddf2824c1ff124a1c5284f8ae897994758e9c4eeb45903b58",
)
# One compiler of torch's headers takes up to this much memory.
BYTES_PER_JOB: Final = 2 * 2**30


class NoToolkitError(RuntimeError):
    """There is no CUDA toolkit, and none could be assembled from wheels."""


def prerequisites(target: Target) -> list[str]:
    """Return what is missing to build at all, each with what to install."""
    missing = []
    if not target.torch and not target.tensorflow:
        missing.append(
            "neither torch nor TensorFlow is installed in "
            f"{sys.executable}: install at least one first (pip install torch)"
        )
    if target.compiler == "no compiler":
        missing.append(
            f"no working C++ compiler (tried {compiler() or '$CXX, g++, c++'}): install g++ "
            "(Debian: apt-get install g++)"
        )
    if not shutil.which("make"):
        missing.append("no make: install it (Debian: apt-get install make)")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        missing.append(
            f"no Python.h in {include}: install Python's headers (Debian: apt-get install "
            "python3-dev)"
        )
    return missing


def default_jobs() -> int:
    """Return as many jobs as there are cores and memory for, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // BYTES_PER_JOB))


def write_pins(pins: Sequence[str], path: Path) -> Path:
    """Write pinned requirements to a file: pip takes hashes from files only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(pins) + "\n", encoding="utf-8")
    return path


def install_pinned(steps: Steps, pins: Sequence[str], folder: Path) -> None:
    """Install pinned wheels into a separate folder; pip stops if a hash differs."""
    file = write_pins(pins, folder.with_suffix(".txt"))
    steps.run(
        [*PIP, "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        + ["--target", str(folder), "--requirement", str(file)]
    )


def find_cmake(steps: Steps, work: Path) -> str:
    """Return a cmake >= 3.13; if there is none, one from the package index for this build."""
    scripts = Path(sysconfig.get_path("scripts"), "cmake")
    for candidate in (os.environ.get("HOROVOD_CMAKE"), shutil.which("cmake"), str(scripts)):
        if not candidate or not shutil.which(candidate):
            continue
        version = re.search(r"version (\d+)\.(\d+)", steps.run([candidate, "--version"]))
        if version and (int(version[1]), int(version[2])) >= (3, 13):
            return candidate
    steps.say("no cmake >= 3.13 here: taking one from the package index for this build only")
    install_pinned(steps, CMAKE_PINS, work / "cmake")
    return str(work / "cmake" / "cmake" / "data" / "bin" / "cmake")


def install_cuda(steps: Steps, cuda: str, work: Path) -> horovod_cuda.Toolkit:
    """Assemble a toolkit from wheels, of torch's CUDA version, for this build only.

    They go by torch's version, so no hash of theirs is known ahead: pip takes wheels alone, runs
    nothing of them, and what runs later is NVIDIA's compiler. Raises NoToolkitError.
    """
    wheels = horovod_cuda.requirements(cuda)
    steps.say(f"a CUDA {cuda} toolkit of wheels: {', '.join(wheels)}")
    site = work / "cuda-wheels"
    try:
        steps.run(
            [*PIP, "install", "--quiet", "--only-binary=:all:", "--no-deps"]
            + ["--target", str(site), *wheels]
        )
    except StepError as error:
        # What pip said last; all of it is in the log.
        errors = [line.strip(" |") for line in str(error).splitlines() if "ERROR:" in line]
        raise NoToolkitError(
            f"its wheels could not be installed ({(errors or ['see the log'])[-1]}; "
            f"log: {steps.log})"
        ) from error
    root = work / "cuda"
    toolkit = horovod_cuda.assembled(site, root)
    if toolkit is None:
        lacks = ", ".join(horovod_cuda.missing(root)) or "an nvcc that runs"
        raise NoToolkitError(f"its wheels lack {lacks}")
    return toolkit


def nccl_from_wheel(work: Path) -> dict[str, str]:
    """Return switches for the NCCL of torch's or TensorFlow's wheels, if any.

    Those wheels hold libnccl.so.2 but not the plain name a linker looks for.
    """
    root = Path(sysconfig.get_path("platlib"), "nvidia", "nccl")
    library = root / "lib" / "libnccl.so.2"
    if "HOROVOD_NCCL_HOME" in os.environ or not library.is_file():
        return {}
    home = work / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libnccl.so").symlink_to(library)
    (home / "include").symlink_to(root / "include")
    return {"HOROVOD_NCCL_HOME": str(home), "HOROVOD_NCCL_LINK": "shared"}
