"""What a Horovod build is made against: found without importing a framework, and hashed.

A wheel fits exactly one set of interpreter, frameworks, compiler and processor. Importing torch
and TensorFlow to ask their versions costs ten seconds at every `make`; their installed metadata
says the same in a tenth of one.
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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from horovod_edits import Edit, Versions

# Raise when the recipe itself changes in a way that nothing below shows.
RECIPE: Final = 1
# Distributions that give `import tensorflow`; asked one by one because a scan of all is slow.
TENSORFLOW_NAMES: Final = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
# Horovod's CMake turns these on when the building machine has them.
CPU_FLAGS: Final = ("f16c", "avx", "fma")
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
    """All that a built wheel depends on; the fields are the hash."""

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

    @property
    def frameworks(self) -> str:
        """Return the frameworks in words, for messages."""
        named = (("torch", self.torch), ("tensorflow", self.tensorflow))
        return " and ".join(f"{name} {version}" for name, version in named if version)

    @property
    def versions(self) -> Versions:
        """Return the versions that decide which edits apply."""
        return Versions(_numbers(self.torch), _numbers(self.tensorflow))

    @property
    def gpu(self) -> bool:
        """Say whether GPU tensors go through NCCL."""
        return not self.why_no_gpu()

    def why_no_gpu(self) -> str:
        """Return why NCCL is left out, or an empty string when it is in."""
        if not self.nvcc:
            return "no CUDA toolkit (nvcc) found"
        if self.torch and not self.torch_cuda:
            return f"torch {self.torch} is a CPU build"
        if self.tensorflow and not self.tensorflow_cuda:
            return f"tensorflow {self.tensorflow} is a CPU build"
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
        else:
            # NVTX marks belong to the CUDA toolkit: a CPU build must not depend on it.
            flags["HOROVOD_WITHOUT_NVTX"] = "1"
        return flags

    def digest(self, edits: tuple[Edit, ...], sdist_sha256: str) -> str:
        """Return 12 hex digits that change whenever the wheel would."""
        fields = asdict(self)
        if not self.gpu:
            # Without NCCL nothing of CUDA ends in the wheel.
            fields["nvcc"] = None
        recipe = (RECIPE, sdist_sha256, fields, self.flags(), [edit.text() for edit in edits])
        return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def detect() -> Target:
    """Look at this interpreter and this machine."""
    torch = _version("torch")
    tensorflow = next(filter(None, map(_version, TENSORFLOW_NAMES)), None)
    return Target(
        python=str(sysconfig.get_config_var("SOABI")),
        torch=torch,
        torch_cuda=_torch_cuda() if torch else None,
        tensorflow=tensorflow,
        tensorflow_cuda=bool(tensorflow) and _tensorflow_cuda(),
        compiler=_first_line([compiler() or "no compiler", "--version"]) or "no compiler",
        machine=f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        cpu=_cpu_flags(),
        nvcc=_nvcc(),
        mpi=_mpi(),
        settings=tuple((name, os.environ[name]) for name in PASSED_ON if name in os.environ),
    )


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
    folder = _package_dir("tensorflow")
    info = folder / "python" / "platform" / "build_info.py" if folder else None
    if info is None or not info.is_file():
        return False
    return bool(re.search(r"is_cuda_build\W+True", info.read_text("utf-8")))


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _nvcc() -> str | None:
    home = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    nvcc = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if not nvcc or not Path(nvcc).is_file():
        return None
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release [\d.]+, (V[\d.]+)", done.stdout)
    return found.group(1) if found else None


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
