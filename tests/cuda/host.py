"""The kernels as g++ compiles them, behind the same `launch` as CuPy's: a device without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sn_compress._cuda import Program, source

ORDERS = {"up": 0, "down": 1, "mixed": 2}
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FAST = ("-O2",)
_COMMON = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


@cache
def build(program: Program, flags: tuple[str, ...]) -> Path:
    """Compile a program into a shared library, once for each state of the sources."""
    if shutil.which("g++") is None:
        text = "g++ is not there to run the kernels on the host: apt-get install g++"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    folder = source("block.cuh").parent
    text = "".join(p.read_text() for p in sorted(folder.glob("*.cu*")) + [folder / "host.h"])
    key = hashlib.sha256(repr((text, program, flags)).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir(), f"sn_kernels_{os.getuid()}", f"{key}.so")
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        defines = [f"-D{name}={value}" for name, value in program.defines]
        command = ["g++", *_COMMON, *flags, *defines, "-x", "c++", str(source(program.file))]
        subprocess.run([*command, "-o", str(part)], check=True)
        part.replace(target)
    return target


class Host:
    """Runs kernels from the g++ build; addresses are those of NumPy arrays."""

    def __init__(self, order: str = "up", flags: tuple[str, ...] = FAST) -> None:
        self.order, self.flags = ORDERS[order], flags
        self.launches: list[tuple[str, int]] = []
        self._constants: dict[tuple[Any, ...], np.ndarray] = {}

    def launch(
        self, program: Program, kernel: str, *, blocks: int, threads: int, shared_bytes: int,
        args: Sequence[Any],
    ) -> None:  # fmt: skip
        library = ctypes.CDLL(str(build(program, self.flags)))
        self.launches.append((kernel, blocks))
        given: list[Any] = []
        for arg in args:
            assert arg.size == 1
            if arg.dtype.kind == "V":  # the host takes structs by address
                given.append(ctypes.c_void_p(arg.ctypes.data))
            elif arg.dtype.kind == "f":
                given.append(ctypes.c_float(arg[0]))
            else:
                wide = arg.dtype.itemsize == 8
                given.append((ctypes.c_int64 if wide else ctypes.c_int32)(int(arg[0])))
        getattr(library, kernel)(ctypes.c_int64(blocks), ctypes.c_int32(self.order), *given)

    def constant(self, key: tuple[Any, ...], values: np.ndarray) -> int:
        return int(self._constants.setdefault(key, values).ctypes.data)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.ctypes.data)
