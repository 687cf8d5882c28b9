#!/usr/bin/env python3
"""Find Fashion-MNIST, or download it from Debian's archive; prints its folder.

It looks in $FASHION_MNIST_DIR, where Debian's package installs it, and in .cache/fashion-mnist of
this project. Otherwise, if apt is available, it downloads the package and unpacks it into that
cache, without root and without installing anything. It uses a folder that only this user can
access, and a file is moved to the cache only if its hash is known.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Final

# SHA-256 of what each file unpacks to: packing it again changes the file, not the data.
HASHES: Final = {
    "train-images-idx3-ubyte.gz": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte.gz": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}
FILES: Final = tuple(HASHES)
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
    # Root's apt would fetch as a user of its own, who cannot write to a private folder. A folder
    # open to that user would be open to all, who could put files there for root to unpack.
    apt = ["apt-get", "-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else ["apt-get"]
    with tempfile.TemporaryDirectory(prefix="fashion-mnist-") as name:
        work = Path(name)
        error = _run([*apt, "download", PACKAGE], work)
        if error:
            # The package lists may be absent or old. Only root may renew the system's, and it is
            # not for this script to do; everybody may have lists of their own.
            for folder in ("lists/partial", "cache/archives/partial"):
                (work / folder).mkdir(parents=True)
            apt += ["-o", f"Dir::State::Lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
            error = _run([*apt, "update"], work)
            error = error or _run([*apt, "download", PACKAGE], work)
        packages = list(work.glob(f"{PACKAGE}*.deb"))
        if error or not packages:
            raise RuntimeError(f"`apt-get download {PACKAGE}` failed: {error}")
        if error := _run(["dpkg", "-x", str(packages[0]), "unpacked"], work):
            raise RuntimeError(f"dpkg -x failed: {error}")
        keep(work / "unpacked" / DEBIAN.relative_to("/"))
    return CACHE


def keep(folder: Path) -> None:
    """Copy the four files of a folder into the cache, if all four have the expected content.

    Raises RuntimeError naming the first file that does not.
    """
    for file, expected in HASHES.items():
        actual_hash = content_hash(folder / file)
        if actual_hash != expected:
            raise RuntimeError(
                f"{file} of package {PACKAGE} holds data of SHA-256 {actual_hash}, expected "
                f"{expected}: it is damaged or not Fashion-MNIST, and was not kept"
            )
    CACHE.mkdir(parents=True, exist_ok=True)
    # Whatever the umask: others may read it, none but the owner write.
    CACHE.chmod(0o755)
    for file in FILES:
        partial = CACHE / f"{file}.part"
        shutil.copyfile(folder / file, partial)
        partial.chmod(0o644)
        partial.replace(CACHE / file)


def content_hash(path: Path) -> str:
    """Return the SHA-256, in hex, of a gzip file's uncompressed content.

    Raises RuntimeError if the file is not a complete gzip file.
    """
    digest = hashlib.sha256()
    try:
        with gzip.open(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RuntimeError(f"{path.name} cannot be unpacked: {error}") from error
    return digest.hexdigest()


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()


def main() -> int:
    """Print the folder; if there is none, return 1 and say how to get the data."""
    try:
        print(f"Fashion-MNIST: {find() or fetch()}")
    except (OSError, RuntimeError) as error:
        print(f"Fashion-MNIST is not here: {error}\n{HELP}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
