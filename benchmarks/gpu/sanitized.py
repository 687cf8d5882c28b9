"""memcheck and racecheck of compute-sanitizer over small cases of every CUDA kernel.

The kernels are compiled by CuPy. The same source runs on the host under AddressSanitizer in
tests/cuda/test_sanitized.py; what needs a device is watched here.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec

from gpu.section import CannotError, Section, main, run

FOUND = 9  # exit status that compute-sanitizer is told to give


def watched(section: Section, tool: str) -> None:
    """One tool over all cases; fails if it found something."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    code, output = run(
        [*command, sys.executable, "benchmarks/sanitize_cuda.py"],
        timeout_s=max(5.0, section.left_s() - 1), keep=2500,
    )  # fmt: skip
    if "Device not supported" in output:
        raise CannotError("compute-sanitizer: Device not supported (gVisor, for one)")
    section.row(tool=tool, clean=code == 0, output=output[-600:])
    if code:
        raise RuntimeError(f"{tool} ended with {code}:\n{output}")


def measure(section: Section) -> None:
    """Both tools."""
    if section.dry:
        raise CannotError("compute-sanitizer watches a GPU")
    if find_spec("cupy") is None:
        raise CannotError("CuPy, which compiles the kernels, is not installed")
    if not shutil.which("compute-sanitizer"):
        raise CannotError("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    for tool in ("memcheck", "racecheck"):
        section.part(tool, lambda tool=tool: watched(section, tool), least_s=5)


if __name__ == "__main__":
    main("sanitized", measure)
