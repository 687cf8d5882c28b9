"""NVRTC from its wheel, through ctypes: compiles for any GPU without a toolkit or a device."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def find() -> Path | None:
    """The library of an installed wheel, or of the folder SN_NVRTC names; None if there is none."""
    folders = [Path(os.environ["SN_NVRTC"])] if "SN_NVRTC" in os.environ else []
    spec = find_spec("nvidia") if "nvidia" not in sys.modules else sys.modules["nvidia"].__spec__
    folders += [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
    for folder in folders:
        for library in sorted(folder.glob("**/libnvrtc.so.*"), reverse=True):
            return library
    return None


class CompileError(AssertionError):
    """The compiler's messages."""


@cache
def _load() -> ctypes.CDLL:
    path = find()
    assert path is not None
    # NVRTC looks for its headers' library by name only: it is there once it is loaded.
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_source(text: str, name: str, options: list[str]) -> tuple[bytes, str]:
    """The cubin, or the PTX for a compute_ architecture, and the log; raises CompileError."""
    library, program = _load(), ctypes.c_void_p()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None
    )
    _check(created)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), given)
    log = _read(library, "ProgramLog", program).rstrip(b"\0").decode()
    if status:
        raise CompileError(f"{name} {options}\n{log}")
    kind = "PTX" if any("compute_" in option for option in options) else "CUBIN"
    code = _read(library, kind, program)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log


def _read(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, data))
    return data.raw


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC returned error {status}")
