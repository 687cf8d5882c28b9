"""Describe a build of Horovod: as text before it, as facts for a file after it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, Final

import horovod_cuda
from horovod_edits import VERSION, Edit
from horovod_install import RANKS
from horovod_target import Target, cuda_of, toolkit

# Beside a wheel: how it was made, for who takes it from the cache later.
BUILT: Final = "built.json"


def describe_cuda(target: Target) -> str:
    """Return where CUDA comes from, or why it is left out."""
    if not target.gpu:
        return f"no, {target.why_no_gpu()}"
    cuda, why = toolkit(target)
    passed_over = f"; passed over: {'; '.join(why)}" if why else ""
    kinds = f", for sm_{' sm_'.join(target.arches)}" if target.arches else ""
    if cuda:
        return f"yes, CUDA {cuda.version} at {cuda.root}{kinds}{passed_over}"
    wheels = ", ".join(horovod_cuda.requirements(cuda_of(target) or ""))
    return f"yes, with a toolkit of wheels for this build: {wheels}{kinds}{passed_over}"


def describe(target: Target, edits: tuple[Edit, ...]) -> str:
    """Return a description of what will be built."""
    asked = ", which torch's headers ask for" if target.torch else ""
    lines = [
        f"Horovod {VERSION} for Python {target.python}: {target.frameworks or 'no framework'}",
        f"compiler: {target.compiler}",
        f"NCCL: {describe_cuda(target)}",
        f"C++ standard: {target.standard}{asked}",
        f"MPI: {target.mpi or 'no, mpirun and mpicxx not both found'}",
        f"edits: {', '.join(edit.name for edit in edits)}",
    ]
    return "\n".join(lines)


def facts(target: Target, wheel: Path, moves: list[str]) -> dict[str, Any]:
    """Return what was built, how, with which transports it was checked, and on how many ranks."""
    built = wheel.parent / BUILT
    return {
        "python": platform.python_version(),
        "torch": target.torch,
        "torch_cuda": target.torch_cuda,
        "tensorflow": target.tensorflow,
        "compiler": target.compiler,
        "standard": target.standard,
        "arches": list(target.arches),
        "why_no_nccl": target.why_no_gpu(),
        "moves": moves,
        "ranks": RANKS if moves else 0,
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "built": json.loads(built.read_text(encoding="utf-8")) if built.is_file() else None,
    }
