"""Kernels on an NVIDIA GPU, through CuPy: compiled from source at first use, once per device.

CuPy caches compiled code on disk by the text of the program, not by the files that it includes, so
a changed header would go unnoticed. So headers are put in place of their #include lines, each with
a #line directive, by which the compiler's messages name the real file and line.

Only `constant` and copies to the host wait for the device. Kernels run on the stream on which the
caller's framework works: torch's current stream for torch tensors, CuPy's current one otherwise.
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
# Subnormal numbers do: CuPy adds -ftz=true after these, so on a device they are zeros.
OPTIONS = ("-std=c++17", "-fmad=false")
_DEFAULT_SHARED_BYTES = 48 << 10  # of a block on every device; more has to be requested
_INCLUDE = re.compile(r'#include "([^"]+)"')


@dataclass(frozen=True)
class Program:
    """A source file of csrc/compress and the macros it is compiled with."""

    file: str
    defines: tuple[tuple[str, int], ...] = ()


def text(file: str) -> str:
    """The source of a program with the headers of csrc/compress in place of their #includes."""
    return "\n".join(_lines(file, set())) + "\n"


def _lines(file: str, seen: set[str]) -> list[str]:
    seen.add(file)
    path = source(file)
    lines = [f'#line 1 "{path.as_posix()}"']
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include and include[1] not in seen:
            lines += _lines(include[1], seen)
        # nvrtc warns of `#pragma once` in a main file, which this now is.
        if include or line == "#pragma once":
            lines.append(f'#line {number + 1} "{path.as_posix()}"')
        else:
            lines.append(line)
    return lines


def options(program: Program) -> tuple[str, ...]:
    """Options of the compiler, but for the architecture."""
    return OPTIONS + tuple(f"-D{name}={value}" for name, value in program.defines)


def cupy() -> Any:
    """CuPy, imported at the first device tensor."""
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
    """Whether kernels take this tensor: it is on a CUDA device, and CuPy is installed.

    For tensors of torch there is array code as well; of other libraries nothing else here takes
    one, so those are True without CuPy, too, whose error follows.
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
                # Other streams may read it from now on; a wait once per table and device.
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
    """A vector on a device, of whatever library."""

    address: int
    elements: int
    dtype: str
    device: int
    owner: Any  # the tensor itself, which keeps the memory alive

    @property
    def framework(self) -> str:
        """Whose stream counts: "torch" for its tensors, "cupy" for all others."""
        return "torch" if library_of(self.owner) == "torch" else "cupy"

    @property
    def is_torch(self) -> bool:
        return self.framework == "torch"

    def run(self) -> CudaDevice:
        """The device, with the stream on which this vector's framework works now."""
        return current(self.device, self.framework)

    def to_host(self) -> npt.NDArray[Any]:
        """A copy as a NumPy array, of float32 if it is bfloat16; waits for the device."""
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
    """The device, with the stream on which a framework works now; CuPy's if it is not torch."""
    cuda = cupy().cuda
    if framework != "torch":
        with cuda.Device(device):
            return CudaDevice(device, cuda.get_current_stream())
    # torch is loaded, as there is a tensor of it.
    address = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14, where ExternalStream is deprecated
        return CudaDevice(device, cuda.Stream.from_external(_Pointer(address)))
    return CudaDevice(device, cuda.ExternalStream(address, device))


@dataclass(frozen=True)
class _Pointer:
    """A stream with CUDA's stream protocol, which torch's own have in newer versions alone."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def to_host(array: Any) -> npt.NDArray[Any]:
    """A NumPy copy of a CuPy array, which waits for the device; other arrays as they are."""
    return array.get() if on_cuda(array) else array  # type: ignore[no-any-return]


def from_host(array: npt.NDArray[Any], device: int, framework: str | None) -> Any:
    """A NumPy array's copy on a device, as a torch tensor or a CuPy array."""
    if framework == "torch":
        return sys.modules["torch"].from_numpy(array).to(f"cuda:{device}")
    with current(device, framework).context() as xp:
        return xp.asarray(array)


def empty(elements: int, device: int, framework: str | None) -> Any:
    """An uninitialized vector of float32 on a device; a torch tensor or a CuPy array."""
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(elements, dtype=torch.float32, device=f"cuda:{device}")
    with current(device, framework).context() as xp:
        return xp.empty(elements, "float32")


def view(tensor: Any) -> View:
    """The vector of a CuPy array, torch CUDA tensor or other DLPack tensor, without a copy."""
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
    # A wheel has the sources as `_csrc`. An editable install has no such folder, and nothing for
    # importlib.resources to find.
    folders = (package / "_csrc", package.parent / "csrc" / "compress")
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no source file {name!r} of sn_compress; looked in {' and '.join(map(str, folders))}. "
        "Install superneurons again, or run from a complete clone."
    )
