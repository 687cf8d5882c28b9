"""Determine and hash what a Horovod build is made against, without importing a framework.

A wheel fits exactly one set of interpreter, frameworks, compiler and processor. Importing torch
and TensorFlow to read their versions takes ten seconds at every `make`; reading their installed
metadata takes a tenth of a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sysconfig
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

import horovod_cuda
from horovod_edits import Edit, Versions

# Raise when the recipe itself changes in a way that nothing below shows.
RECIPE: Final = 1
# Distributions that give `import tensorflow`; asked one by one because a scan of all is slow.
TENSORFLOW_NAMES: Final = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
# Horovod's CMake turns these on when the building machine has them.
CPU_FLAGS: Final = ("f16c", "avx", "fma")
# Of fields that came later.
DEFAULTS: Final = {"standard": 17, "arches": (), "wheels": False}
# Settings of the user's that Horovod's build reads and this project has no opinion on.
PASSED_ON: Final = (
    "CXXFLAGS",
    "LDFLAGS",
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_LINK",
)


@dataclass(frozen=True)
class Target:
    """Everything that a built wheel depends on; the fields determine the hash."""

    python: str
    torch: str | None
    torch_cuda: str | None
    tensorflow: str | None
    tensorflow_cuda: bool
    compiler: str
    machine: str
    cpu: tuple[str, ...]
    nvcc: str | None
    mpi: str | None
    settings: tuple[tuple[str, str], ...] = ()
    standard: int = 17  # of C++, that torch's headers ask for
    arches: tuple[str, ...] = ()  # of GPUs, ("80", "90"); empty: all that nvcc knows
    wheels: bool = False  # nvcc is to come from wheels, of torch_cuda

    @property
    def frameworks(self) -> str:
        """Return the frameworks in words, for messages."""
        named = (("torch", self.torch), ("tensorflow", self.tensorflow))
        return " and ".join(f"{name} {version}" for name, version in named if version)

    @property
    def versions(self) -> Versions:
        """Return the versions that decide which edits apply."""
        return Versions(
            _numbers(self.torch),
            _numbers(self.tensorflow),
            standard=self.standard,
            cuda_unused=bool(self.torch_cuda) and not self.gpu,
            gpu=self.gpu,
        )

    @property
    def gpu(self) -> bool:
        """Say whether GPU tensors go through NCCL."""
        return not self.why_no_gpu()

    def why_no_gpu(self) -> str:
        """Return why NCCL is left out, or an empty string when it is in."""
        if not self.torch and not self.tensorflow:
            return "there is no framework to bring CUDA tensors"
        if self.torch and not self.torch_cuda:
            return f"torch {self.torch} is a CPU build"
        if self.tensorflow and not self.tensorflow_cuda:
            return f"tensorflow {self.tensorflow} is a CPU build"
        if not self.nvcc and not self.wheels:
            return "no CUDA toolkit was found or could be had: CPU tensors only"
        return ""

    def flags(self) -> dict[str, str]:
        """Return Horovod's build switches for this target."""
        flags = {
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_CPU_OPERATIONS": "GLOO",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_PYTORCH" if self.torch else "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITH_TENSORFLOW" if self.tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
        }
        if self.gpu:
            flags["HOROVOD_GPU_OPERATIONS"] = "NCCL"
            if self.arches:
                flags["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(self.arches)
        else:
            # NVTX marks belong to the CUDA toolkit: a CPU build must not depend on it.
            flags["HOROVOD_WITHOUT_NVTX"] = "1"
        return flags

    def digest(self, edits: tuple[Edit, ...], sdist_sha256: str) -> str:
        """Return 12 hex digits that change whenever the wheel would."""
        fields = asdict(self)
        if not self.gpu:
            # Without NCCL nothing of CUDA ends in the wheel.
            fields |= {"nvcc": None, "arches": (), "wheels": False}
        # What is as it always was is left out, so that wheels from before these fields stay valid.
        fields = {
            name: value for name, value in fields.items() if value != DEFAULTS.get(name, self)
        }
        recipe = (RECIPE, sdist_sha256, fields, self.flags(), [edit.text() for edit in edits])
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def detect(*, cpu_only: bool = False) -> Target:
    """Detect the target of this interpreter and machine.

    cpu_only : leave CUDA out, whatever is there
    """
    torch = _version("torch")
    torch_cuda = _torch_cuda() if torch else None
    tensorflow = next(filter(None, map(_version, TENSORFLOW_NAMES)), None)
    target = Target(
        python=str(sysconfig.get_config_var("SOABI")),
        torch=torch,
        torch_cuda=torch_cuda,
        tensorflow=tensorflow,
        tensorflow_cuda=bool(tensorflow) and _tensorflow_cuda(),
        compiler=_first_line([compiler() or "no compiler", "--version"]) or "no compiler",
        machine=f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        cpu=_cpu_flags(),
        nvcc=None,
        mpi=_mpi(),
        settings=tuple((name, os.environ[name]) for name in PASSED_ON if name in os.environ),
        standard=_standard() if torch else 17,
        wheels=True,
    )
    return without_cuda(target) if cpu_only or not target.gpu else _with_cuda(target)


def without_cuda(target: Target) -> Target:
    """Return the same target for CPU tensors."""
    return replace(target, nvcc=None, wheels=False, arches=())


def toolkit(target: Target) -> tuple[horovod_cuda.Toolkit | None, list[str]]:
    """Return the installed toolkit for a target, and why others were rejected."""
    cuda = cuda_of(target)
    if not cuda:
        return None, []
    return horovod_cuda.find_toolkit(cuda, horovod_cuda.candidates(os.environ))


def cuda_of(target: Target) -> str | None:
    """Return the CUDA version that the frameworks were built with."""
    return target.torch_cuda or (_tensorflow_cuda_version() if target.tensorflow_cuda else None)


def _with_cuda(target: Target) -> Target:
    cuda, _ = toolkit(target)
    arches: tuple[str, ...] = ()
    if target.torch and "HOROVOD_BUILD_CUDA_CC_LIST" not in os.environ:
        nvcc = cuda.root / "bin" / "nvcc" if cuda else Path("nvcc")
        arches = horovod_cuda.architectures(horovod_cuda.torch_architectures(), nvcc)
    nvcc_version = cuda.version if cuda else None
    # Without a version nobody can tell which wheels to take.
    wheels = cuda is None and cuda_of(target) is not None
    return replace(target, nvcc=nvcc_version, wheels=wheels, arches=arches)


def standard_of(header: str) -> int:
    """Return the C++ standard that torch's header requires: `__cplusplus < 202002L` is C++20."""
    years = [int(year) for year in re.findall(r"__cplusplus < (\d{4})\d\dL", header)]
    return max([17, *(year % 100 for year in years)])


def _standard() -> int:
    folder = _package_dir("torch")
    header = folder / "include/torch/csrc/api/include/torch/all.h" if folder else None
    if header is None or not header.is_file():
        return 17
    return standard_of(header.read_text(encoding="utf-8", errors="replace"))


def compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, else g++, else c++; None when there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str | None) -> tuple[int, ...] | None:
    if version is None:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _torch_cuda() -> str | None:
    # torch/version.py is a handful of assignments; it runs without loading torch.
    folder = _package_dir("torch")
    version_file = folder / "version.py" if folder else None
    if version_file is None or not version_file.is_file():
        return None
    cuda = runpy.run_path(str(version_file)).get("cuda")
    return str(cuda) if cuda else None


def _tensorflow_cuda() -> bool:
    return bool(re.search(r"is_cuda_build\W+True", _tensorflow_build()))


def _tensorflow_cuda_version() -> str | None:
    match = re.search(r"cuda_version\W+(\d+\.\d+)", _tensorflow_build())
    return match.group(1) if match else None


def _tensorflow_build() -> str:
    folder = _package_dir("tensorflow")
    info = folder / "python" / "platform" / "build_info.py" if folder else None
    return info.read_text("utf-8") if info and info.is_file() else ""


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _mpi() -> str | None:
    # Both are needed: mpicxx to build against, mpirun to start ranks.
    if not (shutil.which("mpirun") and shutil.which("mpicxx")):
        return None
    return _first_line(["mpirun", "--version"])


def _cpu_flags() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return ()
    line = re.search(r"^flags\s*:(.*)$", info.read_text(errors="replace"), re.MULTILINE)
    present = set(line.group(1).split()) if line else set()
    return tuple(flag for flag in CPU_FLAGS if flag in present)
