"""Kernels on an NVIDIA GPU, through CuPy: compiled from source on first use, once per device.

CuPy caches compiled code on disk by the text of the program, ignoring the files it includes, so a
changed header would go unnoticed. Therefore headers are inlined in place of their #include lines,
with #line directives that make compiler messages name the real file and line.

Only `constant` and copies to the host synchronize with the device. Kernels run on the stream of the
caller's framework: torch's current stream for torch tensors, CuPy's current stream otherwise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .arrays import library_of, on_cuda
from .errors import CompressError, MissingExtra

# No contraction into fused multiply-adds: selection and codes must not depend on the back end.
# Subnormal numbers do depend on it: CuPy appends -ftz=true, so a device flushes them to zero.
OPTIONS = ("-std=c++17", "-fmad=false")
_DEFAULT_SHARED_BYTES = 48 << 10  # per block, on every device; more has to be requested
_INCLUDE = re.compile(r'#include "([^"]+)"')


@dataclass(frozen=True)
class Program:
    """A source file in csrc/compress and the macros it is compiled with."""

    file: str
    defines: tuple[tuple[str, int], ...] = ()


def text(file: str) -> str:
    """Return the source of a program with the headers of csrc/compress inlined."""
    return "\n".join(_lines(file, set())) + "\n"


def _lines(file: str, seen: set[str]) -> list[str]:
    seen.add(file)
    path = source(file)
    lines = [f'#line 1 "{path.as_posix()}"']
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include and include[1] not in seen:
            lines += _lines(include[1], seen)
        # nvrtc warns about `#pragma once` in a main file, which an inlined header is part of.
        if include or line == "#pragma once":
            lines.append(f'#line {number + 1} "{path.as_posix()}"')
        else:
            lines.append(line)
    return lines


def options(program: Program) -> tuple[str, ...]:
    """Return the compiler options, except the architecture."""
    return OPTIONS + tuple(f"-D{name}={value}" for name, value in program.defines)


def cupy() -> Any:
    """Import and return CuPy; called at the first device tensor."""
    try:
        import cupy
    except ImportError as missing:
        raise MissingExtra(
            "a tensor on a CUDA device needs CuPy, which is not installed; expected one of the "
            "extras: pip install 'superneurons[cuda]' (CUDA 12) or 'superneurons[cuda13]'. "
            "Or compress on the CPU: tensor.cpu()."
        ) from missing
    return cupy


@cache
def installed() -> bool:
    return find_spec("cupy") is not None


def takes(tensor: Any) -> bool:
    """Whether kernels process this tensor: it is on a CUDA device, and CuPy is installed.

    Torch tensors can be processed by array code as well. For other libraries there is only the
    kernel, so this is True even without CuPy, and its import then raises the error.
    """
    return on_cuda(tensor) and (library_of(tensor) != "torch" or installed())


def backend() -> str:
    """Return the back end for device tensors and why; does not import CuPy."""
    if not installed():
        return "none: CuPy is not installed, so tensors have to be on the CPU; see the extra [cuda]"
    return "cupy: kernels are compiled at the first device tensor"


@cache
def _kernel(device: int, program: Program, name: str) -> Any:
    return _module(device, program).get_function(name)


@cache
def _module(device: int, program: Program) -> Any:
    xp = cupy()
    with xp.cuda.Device(device):
        return xp.RawModule(code=text(program.file), options=options(program), backend="nvrtc")


_constants: dict[tuple[int, tuple[Any, ...]], Any] = {}


class CudaDevice:
    """Runs kernels on one device and stream; see ops/launch.py."""

    def __init__(self, device: int, stream: Any) -> None:
        self.device, self.stream = device, stream

    def launch(
        self,
        program: Program,
        kernel: str,
        *,
        blocks: int,
        threads: int,
        shared_bytes: int,
        args: Sequence[Any],
    ) -> None:
        with self.context():
            function = _kernel(self.device, program, kernel)
            _allow_shared(function, kernel, shared_bytes, self.device)
            function((blocks,), (threads,), tuple(args), shared_mem=shared_bytes)

    @contextmanager
    def context(self) -> Iterator[Any]:
        """CuPy, allocating and computing on this device and stream."""
        with cupy().cuda.Device(self.device), self.stream:
            yield cupy()

    def constant(self, key: tuple[Any, ...], values: npt.NDArray[Any]) -> int:
        if (self.device, key) not in _constants:
            with self.context() as xp:
                _constants[self.device, key] = xp.asarray(values)
                # Other streams may read it from now on; one wait per table and device.
                self.stream.synchronize()
        return int(_constants[self.device, key].data.ptr)


def _allow_shared(function: Any, kernel: str, shared_bytes: int, device: int) -> None:
    """Request shared memory beyond a kernel's default; CompressError if the device has less."""
    total = shared_bytes + function.shared_size_bytes
    if total <= _DEFAULT_SHARED_BYTES:
        return
    most = cupy().cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
    if total > most:
        raise CompressError(
            f"{kernel} needs {total} bytes of shared memory; this device has {most} for a block. "
            "Use a smaller block, or drop more (theta)."
        )
    function.max_dynamic_shared_size_bytes = shared_bytes


@dataclass(frozen=True)
class View:
    """A vector on a device, from any library."""

    address: int
    elements: int
    dtype: str
    device: int
    owner: Any  # the tensor itself, which keeps the memory alive

    @property
    def framework(self) -> str:
        """Whose current stream to use: "torch" for torch tensors, "cupy" for all others."""
        return "torch" if library_of(self.owner) == "torch" else "cupy"

    @property
    def is_torch(self) -> bool:
        return self.framework == "torch"

    def run(self) -> CudaDevice:
        """Return the device with the current stream of this vector's framework."""
        return current(self.device, self.framework)

    def to_host(self) -> npt.NDArray[Any]:
        """Copy to a NumPy array, with bfloat16 as float32; waits for the device."""
        with self.run().context():
            return self.array().get()  # type: ignore[no-any-return]

    def array(self) -> Any:
        """The vector as a CuPy array of float32 or float16; copied only if it is bfloat16."""
        if self.is_torch:
            short = self.dtype == "bfloat16"
            return cupy().from_dlpack(self.owner.float() if short else self.owner)
        return self.owner.astype("float32") if self.dtype == "bfloat16" else self.owner

    def store(self, start: int, values: Any) -> None:
        """Write a CuPy array from element `start` on, rounded to this vector's type."""
        if self.is_torch:
            values = sys.modules["torch"].from_dlpack(values)
        self.owner[start : start + len(values)] = values


def current(device: int, framework: str | None) -> CudaDevice:
    """Return the device with a framework's current stream; CuPy's if it is not torch."""
    cuda = cupy().cuda
    if framework != "torch":
        with cuda.Device(device):
            return CudaDevice(device, cuda.get_current_stream())
    # torch is already imported, since one of its tensors exists.
    address = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14, which deprecates ExternalStream
        return CudaDevice(device, cuda.Stream.from_external(_Pointer(address)))
    return CudaDevice(device, cuda.ExternalStream(address, device))


@dataclass(frozen=True)
class _Pointer:
    """A stream that implements CUDA's stream protocol; torch's do so only in newer versions."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def to_host(array: Any) -> npt.NDArray[Any]:
    """Copy a CuPy array to NumPy, waiting for the device; return other arrays unchanged."""
    return array.get() if on_cuda(array) else array  # type: ignore[no-any-return]


def from_host(array: npt.NDArray[Any], device: int, framework: str | None) -> Any:
    """Copy a NumPy array to a device, as a torch tensor or a CuPy array."""
    if framework == "torch":
        return sys.modules["torch"].from_numpy(array).to(f"cuda:{device}")
    with current(device, framework).context() as xp:
        return xp.asarray(array)


def empty(elements: int, device: int, framework: str | None) -> Any:
    """Return an uninitialized float32 vector on a device: a torch tensor or a CuPy array."""
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(elements, dtype=torch.float32, device=f"cuda:{device}")
    with current(device, framework).context() as xp:
        return xp.empty(elements, "float32")


def view(tensor: Any) -> View:
    """Return a view of a CuPy array, torch CUDA tensor or other DLPack tensor, without a copy."""
    home = library_of(tensor)
    if home == "torch":
        tensor = tensor.detach()
        shape, contiguous = tuple(tensor.shape), bool(tensor.is_contiguous())
        address, device = int(tensor.data_ptr()), int(tensor.device.index)
    else:
        if home != "cupy":
            tensor = cupy().from_dlpack(tensor)
        shape, contiguous = tensor.shape, bool(tensor.flags.c_contiguous)
        address, device = int(tensor.data.ptr), int(tensor.device.id)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if len(shape) != 1 or not contiguous:
        raise CompressError(
            f"cannot encode a tensor of shape {shape} with gaps between its elements or more than "
            "one dimension; expected a contiguous vector. Flatten it: tensor.reshape(-1)."
        )
    return View(address, int(shape[0]), dtype, device, tensor)


def source(name: str) -> Path:
    """Return the path of a file of csrc/compress, such as `"pack.cu"`, or FileNotFoundError."""
    package = Path(__file__).resolve().parent
    # A wheel has the sources in `_csrc`. An editable install has no such folder, so
    # importlib.resources would find nothing.
    folders = (package / "_csrc", package.parent / "csrc" / "compress")
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no source file {name!r} of sn_compress; looked in {' and '.join(map(str, folders))}. "
        "Install superneurons again, or run from a complete clone."
    )
