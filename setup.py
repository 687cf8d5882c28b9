"""The part of the packaging that needs code: the C++ extension and the sources it ships.

The C++ back end is an accelerator with NumPy twins, so an install without a working compiler must
succeed. pip hides what a build prints; the reason is therefore also left in the package, in
`sn_compress/_core_missing.txt`, for `sn_compress.backends()` to show.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, CompileError

ROOT = Path(__file__).resolve().parent
CSRC = Path("csrc", "compress")


def sources(pattern: str) -> list[str]:
    """Return files of csrc/compress, relative to the project as setuptools wants them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / CSRC).glob(pattern))


class OptionalBuildExt(build_ext):
    """Builds the extension; when that fails, says what is lost and lets the install go on."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension and keep the note beside it in step with the outcome."""
        note = Path(self.get_ext_fullpath(ext.name)).with_name("_core_missing.txt")
        note.unlink(missing_ok=True)
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError, CompileError) as error:
            text = (
                f"The C++ back end {ext.name} was not built: {error}\n"
                "Everything works without it, on NumPy and SciPy, but encoding and decoding on "
                "the CPU are several times slower.\n"
                "To get it: install a C++17 compiler (Debian: apt-get install g++ python3-dev) "
                "and install again; `pip install -v` shows the compiler's own words.\n"
            )
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(text, encoding="utf-8")
            print(f"\nwarning: {text}", file=sys.stderr)
            # `optional=True` below makes setuptools go on from here.
            raise


def extensions() -> list[Extension]:
    """Return the extension, or nothing where there is no source yet."""
    files = sources("*.cpp")
    if not files:
        return []
    return [
        Extension(
            "sn_compress._core",
            sources=files,
            depends=sources("*.h") + sources("*.hpp"),
            language="c++",
            optional=True,
            # Bytes must not depend on the machine that compiled: no -ffast-math, no -march, no
            # contraction into fused multiply-adds. The two -fno flags give up only errno and
            # floating-point traps, which nothing here reads, and let loops be vectorised.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                "-pthread",
                "-Wall",
                "-Wextra",
            ],
            extra_link_args=["-pthread"],
        )
    ]


def main() -> None:
    """Call setup."""
    packages = find_packages(include=["sn_compress*", "sn_memory*"])
    package_dir = {}
    if sources("*"):
        # Kernels are compiled at first use on the user's machine, so their sources are data of
        # the package. An editable install does not see this mapping: see sn_compress/_sources.py.
        packages.append("sn_compress._csrc")
        package_dir["sn_compress._csrc"] = CSRC.as_posix()
    setup(
        packages=packages,
        package_dir=package_dir,
        package_data={
            "sn_compress": ["py.typed"],
            "sn_memory": ["py.typed"],
            "sn_compress._csrc": ["*.cu", "*.cuh", "*.cpp", "*.h", "*.hpp"],
        },
        include_package_data=False,
        ext_modules=extensions(),
        cmdclass={"build_ext": OptionalBuildExt},
    )


main()
