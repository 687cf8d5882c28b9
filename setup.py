"""The part of the packaging that needs code: the C++ extensions and the sources they ship.

sn_compress works without its C++ back end, only slower, so an install without a working compiler
must succeed; sn_memory's planner is not there then, and says so when it is asked. pip hides what a
build prints; the reason is therefore also left in each package, in `_core_missing.txt` or
`_placing_missing.txt`, for whoever looks for the library to show.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc", "compress")
CSRC_MEMORY = Path("csrc", "memory")
CSRC_PLACING = Path("csrc", "placing")


def sources(pattern: str, folder: Path = CSRC) -> list[str]:
    """Return files of a folder of csrc, relative to the project as setuptools wants them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob(pattern))


# What is lost without each extension.
LOST = {
    "sn_compress._core": "encoding and decoding on the CPU are several times slower",
    "sn_memory._core": "sn_memory's planner and packer are not there: they raise MissingExtra",
    "sn_memory._placing": "sn_memory.torch.use_placing_allocator() raises an error",
}


class OptionalBuildExt(build_ext):
    """Builds the extension; when that fails, says what is lost and lets the install go on."""

    def finalize_options(self) -> None:
        """Compile the extensions at the same time."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension and keep the note beside it in step with the outcome."""
        note = Path(self.get_ext_fullpath(ext.name))
        note = note.with_name(f"{ext.name.rpartition('.')[2]}_missing.txt")
        note.unlink(missing_ok=True)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CompileError) as error:
            text = (
                f"The C++ back end {ext.name} was not built: {error}\n"
                f"All else works without it, but {LOST[ext.name]}.\n"
                "To get it: install a C++17 compiler (Debian: apt-get install g++ python3-dev) "
                "and install again; `pip install -v` shows the compiler's own words.\n"
            )
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(text, encoding="utf-8")
            print(f"\nwarning: {text}", file=sys.stderr)
            # `optional=True` below makes setuptools go on from here.
            raise


# Bytes must not depend on the machine that compiled: no -ffast-math, no -march, no contraction into
# fused multiply-adds. The two -fno flags give up only errno and floating-point traps, which nothing
# here reads, and let loops be vectorised.
COMPILE = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
]


def extension(name: str, folder: Path) -> list[Extension]:
    """Return the extension of a folder, or nothing where there is no source yet."""
    files = sources("*.cpp", folder)
    if not files:
        return []
    return [
        Extension(
            name,
            sources=files,
            # csrc/memory reads headers of csrc/compress, too.
            depends=sources("*.h", folder) + sources("*.h"),
            language="c++",
            optional=True,
            extra_compile_args=COMPILE,
            extra_link_args=["-pthread", "-ldl"],
        )
    ]


def main() -> None:
    """Call setup."""
    packages = find_packages(include=["sn_cli*", "sn_compress*", "sn_memory*"])
    package_dir = {}
    if sources("*"):
        # Kernels are compiled at first use on the user's machine, so their sources are data of
        # the package. An editable install does not see this mapping: see
        # sn_compress/_cuda.py.
        packages.append("sn_compress._csrc")
        package_dir["sn_compress._csrc"] = CSRC.as_posix()
    setup(
        packages=packages,
        package_dir=package_dir,
        package_data={
            "sn_cli": ["py.typed", "graphs/*.json"],
            "sn_compress": ["py.typed"],
            "sn_memory": ["py.typed"],
            "sn_compress._csrc": ["*.cu", "*.cuh", "*.cpp", "*.h", "*.hpp"],
        },
        include_package_data=False,
        ext_modules=[
            *extension("sn_compress._core", CSRC),
            *extension("sn_memory._core", CSRC_MEMORY),
            # An empty module: torch and ctypes call the functions of the library.
            *extension("sn_memory._placing", CSRC_PLACING),
        ],
        cmdclass={"build_ext": OptionalBuildExt},
    )


main()
