"""What the build of Horovod borrows from the machine: compilers, CMake, memory, NCCL."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

from horovod_steps import Steps
from horovod_target import Target, compiler

PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# One compiler of torch's headers takes up to this much memory.
BYTES_PER_JOB: Final = 2 * 2**30


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


def find_cmake(steps: Steps, work: Path) -> str:
    """Return a cmake >= 3.13; where there is none, one from the package index, for this build."""
    scripts = Path(sysconfig.get_path("scripts"), "cmake")
    for candidate in (os.environ.get("HOROVOD_CMAKE"), shutil.which("cmake"), str(scripts)):
        if not candidate or not shutil.which(candidate):
            continue
        version = re.search(r"version (\d+)\.(\d+)", steps.run([candidate, "--version"]))
        if version and (int(version[1]), int(version[2])) >= (3, 13):
            return candidate
    steps.say("no cmake >= 3.13 here: taking one from the package index for this build only")
    steps.run([*PIP, "install", "--target", str(work / "cmake"), "cmake"])
    return str(work / "cmake" / "cmake" / "data" / "bin" / "cmake")


def nccl_from_wheel(work: Path) -> dict[str, str]:
    """Return switches for the NCCL that torch's or TensorFlow's wheels brought, if any.

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
