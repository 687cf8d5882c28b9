"""Packages that a bare machine lacks and a section needs, made importable for sections only.

Nothing is installed: the machine is somebody's. What is lent lies in a folder that goes with the
run and stands in PYTHONPATH, so that ranks and tools of the sections see it, too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

# Where SciPy has had its copy of array-api-compat.
COPIES = ("_lib/array_api_compat", "_external/array_api_compat")


def lend_array_api_compat(folder: Path) -> bool:
    """Make SciPy's copy of array-api-compat importable from a folder; whether there is one."""
    scipy = importlib.util.find_spec("scipy")
    roots = [Path(root) for root in (scipy.submodule_search_locations or ())] if scipy else []
    for copy in (root / name for root in roots for name in COPIES):
        if (copy / "torch").is_dir():
            (folder / "array_api_compat").symlink_to(copy, target_is_directory=True)
            return True
    return False


def lend_horovod(wheels: Path, folder: Path) -> str:
    """Make Horovod importable from a folder, unpacked of wheels; how it went, in words.

    wheels : laid out by `scripts/build_horovod.py --carry`, for this interpreter and torch
    folder : to unpack in, and for the sections' PYTHONPATH; left empty if it does not run
    """
    if importlib.util.find_spec("horovod"):
        return "Horovod: the one installed"
    fitting = [wheel for wheel in sorted(wheels.glob("*.whl")) if fits(wheel.name)]
    if not any(wheel.name.startswith("horovod-") for wheel in fitting):
        return f"Horovod: not installed, and no wheel for this Python in {wheels}"
    for wheel in fitting:
        with zipfile.ZipFile(wheel) as archive:
            tops = {name.partition("/")[0].partition(".")[0] for name in archive.namelist()}
            # What is installed stays what is imported.
            if not any(importlib.util.find_spec(top) for top in tops if top.isidentifier()):
                archive.extractall(folder)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.torch, horovod.runner.launch"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    name = next(wheel.name for wheel in fitting if wheel.name.startswith("horovod-"))
    if done.returncode == 0:
        return f"Horovod: unpacked of {name}"
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    errors = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return f"Horovod: {name} does not run here: {errors[0]}"


def fits(wheel: str) -> bool:
    """Whether a wheel is for this interpreter, by its name."""
    *_, python, abi, _ = wheel.removesuffix(".whl").split("-")
    this = sys.version_info[:2]
    if abi == "abi3":
        match = re.search(r"cp3(\d+)", python)
        return match is not None and (3, int(match.group(1))) <= this
    return bool({f"cp{this[0]}{this[1]}", "py3"} & set(python.split(".")))
