#!/usr/bin/env python3
"""Find Fashion-MNIST, or get it from Debian's archive; prints the folder that holds it.

Looked for in $FASHION_MNIST_DIR, where Debian's package puts it, and in .cache/fashion-mnist of
this project. Else, where apt is at hand, the package is fetched and unpacked into that cache: this
needs no root and installs nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

FILES: Final = tuple(
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
PACKAGE: Final = "dataset-fashion-mnist"
DEBIAN: Final = Path("/usr/share/datasets/fashion-mnist")
CACHE: Final = Path(__file__).resolve().parent.parent / ".cache" / "fashion-mnist"
HELP: Final = (
    f"Get it with `apt-get install {PACKAGE}` (as root, after apt-get update), or put the four "
    f"files {', '.join(FILES)} in a folder and set FASHION_MNIST_DIR to it."
)


def find() -> Path | None:
    """Return the folder that holds the four files, or None.

    Raises FileNotFoundError if FASHION_MNIST_DIR is set and does not hold them: whoever names a
    folder does not want another one used.
    """
    named = os.environ.get("FASHION_MNIST_DIR")
    if named:
        if missing := [name for name in FILES if not Path(named, name).is_file()]:
            raise FileNotFoundError(f"FASHION_MNIST_DIR={named} has no {', '.join(missing)}")
        return Path(named)
    for folder in (DEBIAN, CACHE):
        if all((folder / name).is_file() for name in FILES):
            return folder
    return None


def fetch() -> Path:
    """Download Debian's package and unpack its four files into the cache."""
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise RuntimeError(f"{tool} is not here, so Debian's package cannot be had.")
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as name:
        # apt fetches as its own user when it may, and warns when it may not write here.
        work = Path(name)
        work.chmod(0o777)
        error = _run(["apt-get", "download", PACKAGE], work)
        if error and os.geteuid() == 0:
            # The package lists may be absent or old; only root may renew them.
            error = _run(["apt-get", "update"], work)
            error = error or _run(["apt-get", "download", PACKAGE], work)
        packages = list(work.glob(f"{PACKAGE}*.deb"))
        if error or not packages:
            raise RuntimeError(f"`apt-get download {PACKAGE}` failed: {error}")
        if error := _run(["dpkg", "-x", str(packages[0]), "unpacked"], work):
            raise RuntimeError(f"dpkg -x failed: {error}")
        CACHE.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copyfile(work / "unpacked" / DEBIAN.relative_to("/") / file, CACHE / file)
    return CACHE


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()


def main() -> int:
    """Print the folder; return 1 and say how to get the data where it cannot be had."""
    try:
        print(f"Fashion-MNIST: {find() or fetch()}")
    except (OSError, RuntimeError) as error:
        print(f"Fashion-MNIST is not here: {error}\n{HELP}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
