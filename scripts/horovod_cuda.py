"""Provide a CUDA toolkit for the build of Horovod: an installed one, or one assembled from wheels.

The obvious way is to require nvcc on the PATH. But users who installed torch from a package index
have none; if there is one, it may be a wrapper script, from whose folder CMake guesses a wrong
root; and a toolkit without headers fails late. So a toolkit counts only if it has everything that
the build reads. torch's own wheels contain libraries and most headers of a toolkit, under
nvidia/cu13 (CUDA 12: one folder per package); nvcc and the rest come as wheels of the same version,
in a folder that is deleted after the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# What the build reads of a toolkit; one of each group.
NEEDED: Final = (
    ("bin/nvcc",),
    ("nvvm/bin/cicc",),
    ("include/cuda_runtime.h",),
    ("include/crt/host_config.h",),
    ("include/nvtx3/nvToolsExt.h",),
    ("include/cccl/thrust", "include/thrust"),
    ("include/cuda_profiler_api.h",),
    ("lib64/libcudart_static.a", "lib/libcudart_static.a",
     "targets/x86_64-linux/lib/libcudart_static.a", "targets/sbsa-linux/lib/libcudart_static.a"),
)  # fmt: skip
# The wheels of it, of torch's own CUDA version; that of cccl counts for itself.
WHEELS: Final = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-runtime", "nvtx", "cuda-profiler-api")
# Those that wheels of CUDA 12 keep in others' packages.
INSIDE_12: Final = ("cuda-crt", "nvvm")


@dataclass(frozen=True)
class Toolkit:
    """A complete toolkit: its folder, and its version, such as "13.0"."""

    root: Path
    version: str

    def environment(self) -> dict[str, str]:
        """Every name by which Horovod, torch, CMake and the kernels' flags look for it."""
        root = str(self.root)
        return {
            "CUDA_HOME": root,
            "HOROVOD_CUDA_HOME": root,
            "CUDAToolkit_ROOT": root,
            "CUDACXX": str(self.root / "bin" / "nvcc"),
            "PATH": os.pathsep.join([str(self.root / "bin"), os.environ.get("PATH", "")]),
        }


def missing(root: Path) -> list[str]:
    """Return the files of a toolkit that the build needs and that are missing."""
    return [names[0] for names in NEEDED if not any((root / name).exists() for name in names)]


def version_of(nvcc: Path) -> str | None:
    """Return the version that an nvcc reports; None if it does not run."""
    match = re.search(r"release (\d+\.\d+)", _output_of([str(nvcc), "--version"]))
    return match.group(1) if match else None


def root_of(nvcc: Path) -> Path | None:
    """Return the toolkit's folder of an nvcc, also of a wrapper script: nvcc itself reports it."""
    match = re.search(
        r"^#\$ TOP=(.+)$", _output_of([str(nvcc), "-v", "--dryrun", "x.cu"]), re.MULTILINE
    )
    return Path(match.group(1)).resolve() if match else None


def candidates(env: Mapping[str, str]) -> list[Path]:
    """Yield folders in which a toolkit may be, the user's choice first."""
    named = [env[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if env.get(name)]
    if named:
        return [Path(path) for path in named]
    nvcc = shutil.which("nvcc", path=env.get("PATH", ""))
    on_path = [root_of(Path(nvcc))] if nvcc else []
    usual = Path("/usr/local/cuda")
    return [*(path for path in on_path if path), *([usual] if usual.is_dir() else [])]


def find_toolkit(cuda: str, roots: Iterable[Path]) -> tuple[Toolkit | None, list[str]]:
    """Return the first complete toolkit of "13.2"'s major version; and why others were rejected.

    CUDA promises that minor versions of one major version go together.
    """
    why = []
    for root in dict.fromkeys(roots):
        lacks = missing(root)
        if len(lacks) == len(NEEDED):
            why.append(f"{root} is no CUDA toolkit" if root.is_dir() else f"{root} is not there")
            continue
        if lacks:
            why.append(f"{root} has no {', '.join(lacks)}")
            continue
        version = version_of(root / "bin" / "nvcc")
        if version is None or version.split(".")[0] != cuda.split(".")[0]:
            why.append(f"{root} is CUDA {version}, torch's is {cuda}")
            continue
        return Toolkit(root, version), why
    return None, why


def requirements(cuda: str) -> list[str]:
    """Return pip's requirements for the wheels of a toolkit of this version."""
    major, minor = cuda.split(".")[:2]
    old = int(major) < 13
    suffix = f"-cu{major}" if old else ""
    names = [name for name in WHEELS if not (old and name in INSIDE_12)]
    exact = [f"nvidia-{name}{suffix}=={major}.{minor}.*" for name in names]
    return [*exact, f"nvidia-cuda-cccl{suffix}>={major}.{minor},<{int(major) + 1}"]


def assembled(site: Path, root: Path) -> Toolkit | None:
    """Put the folders of NVIDIA's wheels below `site` together as one root; None if it lacks any.

    Copied, not linked: nvcc looks for its parts beside where it really lies.
    """
    parts = ("bin", "include", "lib", "nvvm", "targets")
    for package in sorted((site / "nvidia").glob("*")):
        for part in (package / name for name in parts):
            if part.is_dir():
                shutil.copytree(part, root / part.name, dirs_exist_ok=True, symlinks=True)
    if not (root / "bin" / "nvcc").is_file():
        return None
    for tool in [*(root / "bin").iterdir(), *(root / "nvvm" / "bin").glob("*")]:
        if tool.is_file():
            tool.chmod(0o755)
    if not (root / "lib64").exists():
        (root / "lib64").symlink_to("lib")
    # The plain name, which a linker looks for, is in no wheel.
    for library in (root / "lib").glob("libcudart.so.*"):
        if not (root / "lib" / "libcudart.so").exists():
            (root / "lib" / "libcudart.so").symlink_to(library.name)
    version = version_of(root / "bin" / "nvcc")
    return Toolkit(root, version) if version and not missing(root) else None


def architectures(flags: str, nvcc: Path) -> tuple[str, ...]:
    """Return torch's architectures ("sm_80 sm_90a compute_120") that this nvcc supports, too.

    Returns numbers as Horovod wants them, ("80", "90", "120"), in order.
    """
    wanted = {int(arch) for arch in re.findall(r"(?:sm|compute)_(\d+)", flags)}
    known = {
        int(arch)
        for arch in re.findall(r"compute_(\d+)", _output_of([str(nvcc), "--list-gpu-arch"]))
    }
    return tuple(str(arch) for arch in sorted(wanted & known if known else wanted))


def run_path(cuda: str, toolkit: Toolkit, env: Mapping[str, str], *, ours: bool) -> str:
    """Return the run path by which a built library finds NCCL and CUDA, for CMake.

    Beside itself in site-packages, where torch's or TensorFlow's wheels put them; a torch that was
    imported first has loaded them already. What the user installed comes before.

    there : the toolkit of the build
    ours : it was put together of wheels, so it is gone by then
    """
    named = [f"{env['HOROVOD_NCCL_HOME']}/lib"] if "HOROVOD_NCCL_HOME" in env else []
    installed = [] if ours else [str(toolkit.root / "lib64")]
    major = cuda.split(".")[0]
    wheels = ["nccl", f"cu{major}" if int(major) >= 13 else "cuda_runtime"]
    relative = [f"$ORIGIN/../../nvidia/{name}/lib" for name in wheels]
    return ";".join([*named, *installed, *relative, "$ORIGIN/../../torch/lib"])


def run_paths(library: Path) -> list[str]:
    """Return the run paths of a library, as binutils' readelf reads them."""
    listing = _output_of(["readelf", "-d", str(library)])
    groups = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", listing)
    return [path for paths in groups for path in paths.split(":")]


def torch_architectures() -> str:
    """Return the architectures of this interpreter's torch; needs no device."""
    code = (
        "import torch; print(' '.join(torch.cuda.get_arch_list()) or torch._C._cuda_getArchFlags())"
    )
    return _output_of([sys.executable, "-c", code])


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr
