#!/usr/bin/env python3
"""Build Horovod 0.28.1 against the torch and TensorFlow installed in this interpreter.

`pip install horovod` fails with every torch since 2.1 and every TensorFlow since 2.18: the last
release is from 2023. This script downloads that release from the package index, checks it against
a pinned hash, applies the edits listed in horovod_edits.py, builds a wheel, caches it under a hash
of everything it was built against, installs it and checks it with two ranks.

    python scripts/build_horovod.py                # build (or take from the cache) and install
    python scripts/build_horovod.py --check        # only print what would be done
    python scripts/build_horovod.py --wheel-only   # do not install
    python scripts/build_horovod.py --carry DIR    # also for a machine without a network

Where torch is a CUDA build, GPU tensors go through NCCL: with a CUDA toolkit that is there, or one
put together from wheels for this build (horovod_cuda.py). Without either it is for CPU tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import horovod_cuda
import horovod_edits
from horovod_edits import VERSION
from horovod_facts import BUILT, describe, facts
from horovod_install import carry, install, installed_version
from horovod_steps import StepError, Steps
from horovod_target import Target, compiler, cuda_of, detect, toolkit, without_cuda
from horovod_tools import (
    BUILD_PINS,
    PIP,
    NoToolkitError,
    default_jobs,
    find_cmake,
    install_cuda,
    install_pinned,
    nccl_from_wheel,
    prerequisites,
    write_pins,
)

SDIST_SHA256: Final = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CACHE: Final = Path(__file__).resolve().parents[1] / ".cache" / "horovod"


def sdist_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_sdist(
    steps: Steps, cache: Path, local_sdist: Path | None, env: Mapping[str, str]
) -> Path:
    """Return the release's checked source archive: the given one, the cached one, or a download."""
    kept = cache / "sdist" / f"horovod-{VERSION}.tar.gz"
    source = local_sdist or kept
    if local_sdist and not local_sdist.is_file():
        raise steps.failed([f"--sdist {local_sdist}: no such file"])
    if not source.is_file():
        # pip asks a source archive for its name by running its setup.py. With the hash given it
        # compares first, so that an archive which is not the release never runs.
        pin = f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}"
        file = write_pins([pin], kept.parent / "horovod.txt")
        steps.run(
            [*PIP, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
            + ["--require-hashes", "--dest", str(kept.parent), "--requirement", str(file)],
            env=env,
        )
    actual_hash = sdist_hash(source)
    if actual_hash != SDIST_SHA256:
        raise steps.failed(
            [
                f"{source} has SHA-256 {actual_hash}",
                f"expected {SDIST_SHA256}",
                "delete it and try again",
            ]
        )
    if local_sdist:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local_sdist, kept)
    return source


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a checked archive."""
    with tarfile.open(archive) as tar:
        # Python 3.11 before 3.11.4 has no filters; the archive's hash is pinned either way.
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)


def build_environment(target: Target, digest: str, jobs: int) -> dict[str, str]:
    """Return the build's environment: our variables, and none of stray Horovod's or make's."""
    kept = dict(target.settings)
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("HOROVOD_") and name not in ("MFLAGS", "MAKELEVEL")
    }
    env |= kept | target.flags()
    env |= {
        "CXX": compiler() or "c++",
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        # Gloo asks for CMake 2.8 compatibility, which CMake 4 refuses without this.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # The hash becomes part of the installed version, so that a later run knows its own work.
        "HOROVOD_LOCAL_VERSION": f"sn{digest}",
        "PYTHONUNBUFFERED": "1",
    }
    return env


def compile_wheel(
    steps: Steps, tree: Path, work: Path, env: dict[str, str], *, folder: Path
) -> Path:
    """Build the edited source and move the wheel into the cache."""

    def show(line: str) -> None:
        # make prints "[ 42%] Building CXX object ..."
        if match := re.match(r"\s*\[\s*(\d+)%\]", line):
            steps.percent(int(match.group(1)))

    steps.run(
        [*PIP, "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        + ["--wheel-dir", str(work / "wheel"), str(tree)],
        env=env,
        cwd=work,
        on_line=show,
    )
    wheels = list((work / "wheel").glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise steps.failed([f"pip left {len(wheels)} wheels, expected one"])
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                paths = horovod_cuda.run_paths(Path(archive.extract(name, work / "look")))
                if any(path.startswith(str(work)) for path in paths):
                    raise steps.failed([f"{name} looks for others in {', '.join(paths)}"])
    # A copy under another name first, so that a reader never sees half a wheel.
    partial = folder / f"{wheels[0].name}.part"
    shutil.copyfile(wheels[0], partial)
    return partial.replace(folder / wheels[0].name)


def build(
    target: Target, edits: tuple[horovod_edits.Edit, ...], folder: Path, args: argparse.Namespace
) -> Path:
    """Make the wheel: fetch, edit, compile. Returns its path in the cache."""
    steps: Steps = args.steps
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        work = Path(name)
        steps.begin("get what the build needs")
        tools: dict[str, str] = {}
        if not args.installed_tools:
            install_pinned(steps, BUILD_PINS, work / "tools")
            # Before what is installed here, for every Python that the build starts.
            tools = {"PYTHONPATH": str(work / "tools")}
        cmake = find_cmake(steps, work)
        steps.begin("get Horovod's source and check its hash")
        sdist = fetch_sdist(steps, args.cache, args.sdist, os.environ | tools)
        steps.begin(f"unpack and make {len(edits)} edits")
        unpack(sdist, work)
        tree = work / f"horovod-{VERSION}"
        try:
            horovod_edits.apply(edits, tree)
        except horovod_edits.EditError as error:
            raise steps.failed([str(error)]) from error
        env = build_environment(target, folder.name, args.jobs) | tools | {"HOROVOD_CMAKE": cmake}
        built: dict[str, Any] = {"toolkit": None, "jobs": args.jobs}
        if target.gpu:
            cuda = toolkit(target)[0]
            ours = cuda is None
            if cuda is None:
                steps.begin("put a CUDA toolkit together from wheels")
                cuda = install_cuda(steps, cuda_of(target) or "", work)
            built["toolkit"] = f"CUDA {cuda.version}, {'of wheels' if ours else 'installed'}"
            rpath = horovod_cuda.run_path(cuda_of(target) or "", cuda, os.environ, ours=ours)
            env |= cuda.environment() | nccl_from_wheel(work) | {"HOROVOD_RPATH": rpath}
        steps.begin(f"compile with {args.jobs} job{'s' if args.jobs > 1 else ''}")
        wheel = compile_wheel(steps, tree, work, env, folder=folder)
        built |= {"seconds": steps.seconds(), "cpu_seconds": steps.cpu_seconds()}
        (folder / BUILT).write_text(json.dumps(built, indent=1) + "\n", encoding="utf-8")
        return wheel


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only print what would be done")
    parser.add_argument("--wheel-only", action="store_true", help="build, do not install")
    parser.add_argument("--cpu-only", action="store_true", help="leave CUDA and NCCL out")
    parser.add_argument("--force", action="store_true", help="build even if a wheel is cached")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where to cache wheels")
    parser.add_argument("--sdist", type=Path, help=f"a local horovod-{VERSION}.tar.gz")
    parser.add_argument(
        "--installed-tools",
        action="store_true",
        help="build with the setuptools and wheel of this interpreter, not the pinned ones: for "
        "machines without a package index",
    )
    parser.add_argument(
        "--carry",
        type=Path,
        help="put the wheel and its dependencies into a folder, for a machine without a network",
    )
    parser.add_argument("--json", type=Path, help="write what was built and how it was checked")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="parallel compilers")
    args = parser.parse_args(argv)
    args.cache = args.cache.resolve()
    return args


def main(argv: list[str] | None = None) -> int:
    """Build and install; return the exit status."""
    args = parse(argv)
    target = detect(cpu_only=args.cpu_only)
    try:
        return make(target, args)
    except NoToolkitError as error:
        cuda = cuda_of(target)
        print(
            f"Horovod is built for CPU tensors only: no CUDA {cuda} toolkit was found, and {error}"
        )
        return make(without_cuda(target), args)


def make(target: Target, args: argparse.Namespace) -> int:
    """Build and install for a target; return the exit status. Raises NoToolkitError."""
    edits = horovod_edits.wanted(target.versions)
    digest = target.digest(edits, SDIST_SHA256)
    folder = args.cache / digest
    wheel = None if args.force else next(folder.glob("horovod-*.whl"), None)
    wanted = f"{VERSION}+sn{digest}"
    installed = installed_version() == wanted
    # A report tells of a proof, and wheels are laid out of the cache.
    asked = (args.check, args.wheel_only, args.force, args.json, args.carry)
    if installed and not any(asked):
        print(f"Horovod {wanted} is installed already: nothing to do")
        return 0
    print(describe(target, edits))
    missing = prerequisites(target)
    if args.check:
        print(f"build hash: {digest}")
        print(f"wheel: {wheel or 'not built yet'}\ninstalled: {installed_version() or 'none'}")
        print("\n".join(f"missing: {text}" for text in missing) or "missing: nothing")
        return 1 if missing else 0
    if missing:
        print("cannot build Horovod:\n" + "\n".join(f"  - {text}" for text in missing))
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(
        (
            0 if wheel else 4,
            0 if wheel or not (target.gpu and target.wheels) else 1,
            0 if args.wheel_only else 2,
            1 if args.carry else 0,
        )
    )
    args.steps = steps = Steps(total, folder / "build.log" if not wheel else folder / "install.log")
    moves: list[str] = []
    try:
        wheel = wheel or build(target, edits, folder, args)
        if not args.wheel_only:
            moves = install(steps, wheel, target)
        if args.carry:
            carry(steps, wheel, args.carry.resolve())
    except StepError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    if args.json:
        wheel_facts = facts(target, wheel, moves)
        args.json.write_text(json.dumps(wheel_facts, indent=1) + "\n", encoding="utf-8")
    print(f"done: {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
