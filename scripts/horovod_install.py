"""Install a built wheel and check it with two ranks, or copy it for another machine."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from horovod_steps import Steps
from horovod_target import Target
from horovod_tools import PIP

SCRIPTS: Final = Path(__file__).resolve().parent
# What Horovod's runner imports.
RUNTIME: Final = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")
RANKS: Final = 2


def installed_version() -> str | None:
    """Return the version of the Horovod in this interpreter, or None."""
    try:
        return metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None


def install(steps: Steps, wheel: Path, target: Target) -> list[str]:
    """Install a wheel and check it; return its transports: ["Gloo", "NCCL"].

    One that fails its proof is taken out again: the next run would find it installed and say that
    there is nothing to do.
    """
    steps.begin(f"install {wheel.name}")
    steps.run([*PIP, "install", "--quiet", *RUNTIME])
    steps.run([*PIP, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
    steps.begin(f"check the build with {RANKS} ranks")
    try:
        return smoke_test(steps, target)
    except BaseException:
        steps.run([*PIP, "uninstall", "--quiet", "--yes", "horovod"])
        raise


def smoke_test(steps: Steps, target: Target) -> list[str]:
    """Print the build's features and average numbers over two ranks."""
    run = [sys.executable, "-m", "horovod.runner.launch"]
    report = steps.run([*run, "--check-build"])
    # Its list of frameworks is left out: it marks PyTorch as there when horovod.torch merely
    # imports, which it does without torch. The ranks below are the proof.
    parts = sorted(set(re.findall(r"\[X\]\s+(.+)", report)) & {"Gloo", "MPI", "NCCL"})
    steps.say(f"moves tensors by: {', '.join(parts)}")
    if target.gpu and "NCCL" not in parts:
        raise steps.failed([*report.splitlines(), "NCCL was asked for and is not in the build"])
    # One launch each: two Horovods of one process meet at the rendezvous under the same keys, where
    # the second of a rank that is ahead reads where the first one of its peer listened.
    for name in (name for name in ("torch", "tensorflow") if getattr(target, name)):
        ranks = [*run, "--gloo", "-np", str(RANKS), sys.executable]
        output = steps.run(
            [*ranks, str(SCRIPTS / "horovod_smoke.py"), name],
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        )
        ok = output.count(f"smoke {name} ok")
        if ok != RANKS:
            raise steps.failed([*output.splitlines(), f"{name}: {ok} of {RANKS} ranks reported"])
        steps.say(f"{RANKS} ranks averaged a {name} tensor")
    return parts


def carry(steps: Steps, wheel: Path, folder: Path) -> None:
    """Put the wheel and its dependencies into a folder, for a machine without a package index.

    Other Horovod wheels in the folder are removed, so that it is clear which one to use.
    """
    steps.begin(f"lay out wheels in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("horovod-*.whl"):
        old.unlink()
    steps.run([*PIP, "download", "--quiet", "--only-binary=:all:", "--dest", str(folder), *RUNTIME])
    shutil.copyfile(wheel, folder / wheel.name)
