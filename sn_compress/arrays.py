"""An array's library and device, and operations that the libraries do not have in common.

All code between a rim and the wire is written once, over the array namespace of its arguments
(array-api-compat): NumPy, CuPy, and torch on any device. Only `to_host`, `is_used` and
`AsyncScalars.read` wait for a device. No library is imported: the namespace follows from the array,
or a rim registers one (`register`), e.g. for TensorFlow. Graph tensors cannot be written to, so
callers use the return values of in-place functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

Array = Any  # from NumPy, CuPy, torch, or a library that a rim has registered

_HOST = (np.ndarray, np.generic)
_spaces: dict[type, Any] = {}
_registered: dict[type, Any] = {}


def namespace(array: Array) -> Any:
    """Return the array's library as a namespace of the array API standard."""
    kind = type(array)
    if kind not in _spaces:
        bases = (_registered[base] for base in kind.__mro__ if base in _registered)
        _spaces[kind] = next(bases, None) or array_api_compat.array_namespace(array)
    return _spaces[kind]


def register(kind: type, space: Any) -> None:
    """Support an array type, and its subclasses, that array-api-compat does not know.

    space : namespace with the functions of the standard that the core uses, `constant` for
        Constant.on, and `split`, `bits_of`, `put`, `where_all`, `floats_of`, `top`, `add_at`,
        `rfft` and `irfft`
    """
    _registered[kind] = space


def _library(array: Array) -> Any:
    """Return an array's namespace if a rim has registered it, else None."""
    space = namespace(array)
    return space if space in _registered.values() else None


def is_torch(array: Array) -> bool:
    """Whether it is a torch tensor."""
    return namespace(array) is sys.modules.get("array_api_compat.torch")


def is_fixed(array: Array) -> bool:
    """Whether it is read-only, like a graph tensor."""
    return _library(array) is not None


def device_of(array: Array) -> Any:
    """Return the device, for the `device=` argument of functions that create arrays."""
    return array.device if is_torch(array) else array_api_compat.device(array)


def on_host(array: Array) -> bool:
    """Whether its values are in host memory, so that reading one does not wait."""
    if isinstance(array, _HOST):
        return True
    return is_torch(array) and array.device.type == "cpu"


def library_of(tensor: Any) -> str:
    """Return the package of a tensor's type, such as "torch" or "cupy"; imports nothing."""
    return type(tensor).__module__.partition(".")[0]


def on_cuda(tensor: Any) -> bool:
    """Whether this is a tensor on a CUDA device, from any library; imports nothing."""
    library = library_of(tensor)
    if library == "cupy":
        return True
    if library == "torch":
        return bool(getattr(tensor, "is_cuda", False))
    # DLPack's kDLCUDA is 2. NumPy arrays have the method as well, and return 1.
    return hasattr(tensor, "__dlpack_device__") and int(tensor.__dlpack_device__()[0]) == 2


FLOAT32, FLOAT64, INT32 = (np.dtype(kind) for kind in ("f4", "f8", "i4"))
_PROBE = 4096  # elements of a gradient that `is_used` tests before all of them


def host_view(array: Array, dtype: npt.DTypeLike = FLOAT32) -> npt.NDArray[Any] | None:
    """Return the same memory as a NumPy array, for compiled kernels; None if they cannot use it.

    They can if it is contiguous, in host memory, of this dtype, and not a fake tensor of a capture.
    Call this before the extension, whose calls cannot be captured.
    """
    if type(array) is np.ndarray:
        view = array
    else:
        torch = sys.modules.get("torch")
        if torch is None or torch.compiler.is_compiling() or type(array) is not torch.Tensor:
            return None
        tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
        # make_fx runs on real tensors; the extension would write to their memory untraced.
        if tracer is not None and tracer.get_proxy_mode() is not None:
            return None
        if array.device.type != "cpu" or array.layout is not torch.strided:
            return None
        view = (array.detach() if array.requires_grad else array).numpy()
    return view if view.dtype == dtype and view.flags.c_contiguous else None


def numpy_view(array: Array, dtype: npt.DTypeLike = FLOAT32) -> Array:
    """Return the same memory as a NumPy array if torch would process it with one CPU thread.

    NumPy's calls take about half as long, which matters for small tensors. With more threads
    torch's functions use them, so the tensor is returned.
    """
    if type(array) is np.ndarray or not is_torch(array):
        return array
    view = host_view(array, dtype)
    return array if view is None or host_threads(array) > 1 else view


def host_threads(like: Array) -> int:
    """Return the number of CPU threads that the array's library uses."""
    torch = sys.modules.get("torch")
    # If torch is loaded, its setting applies to NumPy arrays as well: see `numpy_view`.
    return int(torch.get_num_threads()) if torch is not None else _processors()


@cache
def _processors() -> int:
    wish = os.environ.get("OMP_NUM_THREADS", "")  # torchrun sets it to 1
    if wish.isdigit() and int(wish):
        return int(wish)
    usable = getattr(os, "sched_getaffinity", None)  # only on Linux
    return len(usable(0)) if usable else os.cpu_count() or 1


def to_host(array: Array) -> npt.NDArray[Any]:
    """Return the values as a NumPy array; shares memory with an array on the host."""
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        return np.asarray(array.detach().cpu().numpy())
    return np.asarray(array.get() if hasattr(array, "get") else array)  # CuPy refuses asarray


def asarray_like(array: Array, like: Array) -> Array:
    """Convert an array to the library and device of `like`, keeping dtype; may share memory."""
    if isinstance(like, np.ndarray):
        return to_host(array)
    if (library := _library(like)) is not None:
        return library.asarray(array)  # TensorFlow places its tensors by itself
    if type(array) is type(like) and array.device == like.device:
        return array
    return _on_device(to_host(array), like)


def _on_device(host: npt.NDArray[Any], like: Array) -> Array:
    """Move a host array to the device of `like`; may share memory."""
    # torch warns about read-only memory, and would write to it.
    host = host if host.flags.writeable else host.copy()
    return namespace(like).asarray(host, device=like.device)


class Constant:
    """A host array that depends on shapes and settings only, copied once to each device."""

    def __init__(self, host: npt.NDArray[Any]) -> None:
        self.host = host
        self._copies: dict[str, Array] = {}

    def on(self, like: Array) -> Array:
        """Return the array on the device of `like`."""
        if isinstance(like, _HOST):
            return self.host
        if (library := _library(like)) is not None:
            return library.constant(self, self.host)
        key = f"{type(like).__module__} {like.device}"
        if key not in self._copies:
            self._copies[key] = _on_device(self.host, like)
        return self._copies[key]


def take(values: Array, index: Array) -> Array:
    """Return [n] values at [m] positions, [m]."""
    if isinstance(values, np.ndarray):
        return values[index]
    if is_torch(values):
        return values.index_select(0, index)  # several times as fast as values[index]
    return namespace(values).take(values, index, axis=0)


def runs_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Run-length encode: (number of equal adjacent lengths, length)."""
    return [(len(list(same)), length) for length, same in groupby(lengths)]


def spread(values: Array, runs: Sequence[tuple[int, int]]) -> Array:
    """Repeat each value as `runs_of` says, [n], without an index for each element."""
    xp = namespace(values)
    pieces = zip(split(values, [count for count, _ in runs]), runs, strict=True)
    return join([xp.reshape(xp.broadcast_to(value[:, None], run), (-1,)) for value, run in pieces])


def put(target: Array, index: Array, values: Array) -> Array:
    """Set values at [m] positions of the first axis, in place if possible; return the target."""
    if (library := _library(target)) is not None:
        return library.put(target, index, values)
    target[index] = values
    return target


def filled(target: Array, value: Array) -> Array:
    """Set all elements to a 0-d value, in place if possible; return the target."""
    if _library(target) is not None:
        return namespace(target).broadcast_to(value, target.shape)
    target[...] = value
    return target


def bits_of(values: Array) -> Array:
    """Return the bits of float32 as int32; may share memory."""
    library = _library(values)
    return values.view(namespace(values).int32) if library is None else library.bits_of(values)


def floats_of(bits: Array) -> Array:
    """Return the float32 with these int32 bits; may share memory."""
    library = _library(bits)
    return bits.view(namespace(bits).float32) if library is None else library.floats_of(bits)


def top(values: Array, count: int) -> Array:
    """Return the largest values of each row, in any order, [rows, count]."""
    if is_torch(values):
        return values.topk(count, dim=1, sorted=False).values
    if (library := _library(values)) is not None:
        return library.top(values, count)
    if isinstance(values, np.ndarray):
        return np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return namespace(values).sort(values, axis=1)[:, -count:]


def add_at(target: Array, index: Array, values: Array) -> Array:
    """Add values at [m] positions of the first axis, in place if possible; return the target.

    Integers have the same sum in any order; for floats no position may occur twice.
    """
    if is_torch(target):
        return target.index_add_(0, index, values)
    if (library := _library(target)) is not None:
        return library.add_at(target, index, values)
    namespace(target).add.at(target, index, values)
    return target


def scipy_fft(like: Array) -> Any:
    """Return scipy.fft for NumPy, cupyx.scipy.fft (cuFFT, with cached plans) for CuPy."""
    return import_module("cupyx.scipy.fft" if library_of(like) == "cupy" else "scipy.fft")


def rfft(blocks: Array) -> Array:
    """Return the orthonormal real FFT of each row, [rows, 2 * bins], (real, imaginary) interleaved.

    Any row length, in single precision. No library splits one row among threads.
    """
    if is_torch(blocks):
        torch = sys.modules["torch"]
        return torch.view_as_real(torch.fft.rfft(blocks, norm="ortho")).reshape(len(blocks), -1)
    if (library := _library(blocks)) is not None:
        return library.rfft(blocks)
    return scipy_fft(blocks).rfft(blocks, axis=-1, norm="ortho").view(namespace(blocks).float32)


def irfft(parts: Array, block: int) -> Array:
    """Invert `rfft`, to [rows, block]; may overwrite its argument."""
    if is_torch(parts):
        torch = sys.modules["torch"]
        pairs = torch.view_as_complex(parts.reshape(len(parts), -1, 2))
        return torch.fft.irfft(pairs, n=block, norm="ortho")
    if (library := _library(parts)) is not None:
        return library.irfft(parts, block)
    bins = parts.view(namespace(parts).complex64)
    return scipy_fft(parts).irfft(bins, n=block, axis=-1, norm="ortho", overwrite_x=True)


def shifted_right(values: Array, places: int) -> Array:
    """Divide integers by 2**places, rounding down."""
    if _library(values) is None:
        return values >> places
    return namespace(values).bitwise_right_shift(values, places)


def matrix_transpose(matrix: Array) -> Array:
    """View [a, b] as [b, a]; TensorFlow's graphs fuse it into the matrix product."""
    return matrix.T if _library(matrix) is None else namespace(matrix).permute_dims(matrix, (1, 0))


def where_all(flag: Array, these: Sequence[Array], otherwise: Sequence[Array]) -> list[Array]:
    """Return all of `these` if a 0-d bool is set, else all of `otherwise`."""
    if (library := _library(flag)) is not None:
        return library.where_all(flag, these, otherwise)  # type: ignore[no-any-return]
    xp = namespace(flag)
    return [xp.where(flag, this, other) for this, other in zip(these, otherwise, strict=True)]


def clipped(values: Array, least: float, largest: float) -> Array:
    """Clip; array-api-compat's `clip` is six operations in torch."""
    if is_torch(values):
        return values.clamp(least, largest)
    return namespace(values).clip(values, least, largest)


def rounded(fresh: Array, limit: int) -> Array:
    """Round and clip to +-limit, keeping the dtype; may overwrite the argument."""
    if isinstance(fresh, np.ndarray):
        return np.clip(np.rint(fresh, out=fresh), -limit, limit, out=fresh)
    if is_torch(fresh):
        return fresh.round_().clamp_(-limit, limit)
    return clipped(namespace(fresh).round(fresh), -limit, limit)


def largest_of(values: Array, group_of: Array, groups: int) -> Array:
    """Return the largest value in each group, [groups]; the [n] values are not negative."""
    xp = namespace(values)
    least = xp.zeros(groups, dtype=values.dtype, device=device_of(values))
    if is_torch(values):
        return least.scatter_reduce(0, group_of, values, "amax")
    xp.maximum.at(least, group_of, values)
    return least


def largest_of_rows(values: Array) -> Array:
    """Return the largest magnitude in each row of [rows, n] float32."""
    xp = namespace(values)
    if is_torch(values):  # one operation
        return xp.linalg.vector_norm(values, ord=float("inf"), axis=1)
    if isinstance(values, np.ndarray):
        # Two read-only passes: an array of magnitudes would be written to memory and read again.
        return np.maximum(values.max(axis=1), -values.min(axis=1))
    return xp.max(xp.abs(values), axis=1)


def inverse(values: Array) -> Array:
    """Return 1 / values, rounded once; written as 1 / x it is two operations in torch."""
    return values.reciprocal() if is_torch(values) else 1 / values


def put_all(targets: Sequence[Array], values: Sequence[Array]) -> None:
    """Copy each value into the target of its shape."""
    if is_torch(targets[0]):  # a single kernel launch for many small tensors
        sys.modules["torch"]._foreach_copy_(list(targets), list(values))
        return
    for target, value in zip(targets, values, strict=True):
        target[...] = value


def split(flat: Array, sizes: Sequence[int]) -> list[Array]:
    """Split a vector into views of these sizes, which add up to its length."""
    if len(sizes) == 1:
        return [flat]
    if is_torch(flat):
        return list(flat.split(list(sizes)))
    if (library := _library(flat)) is not None:
        return library.split(flat, sizes)  # type: ignore[no-any-return]
    ends = np.cumsum(sizes)
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def join(parts: Sequence[Array]) -> Array:
    """Concatenate vectors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else namespace(parts[0]).concat(list(parts))


def transposed(matrices: Array) -> Array:
    """View [k, a, b] as [k, b, a]."""
    return namespace(matrices).permute_dims(matrices, (0, 2, 1))


def products(left: Array, right: Array) -> Array:
    """Multiply [k, a, b] by [k, b, c], giving [k, a, c]."""
    if is_torch(left):
        return left.bmm(right)  # matmul takes six operations for the same
    return namespace(left).matmul(left, right)


def squared_norm(matrix: Array) -> Array:
    """Return the sum of squares, 0-d."""
    flat = namespace(matrix).reshape(matrix, (-1,))
    if is_torch(flat):
        return sys.modules["torch"].dot(flat, flat)
    return flat @ flat if _library(flat) is None else namespace(flat).vecdot(flat, flat)


def product(left: Array, right: Array, out: Array | None) -> Array:
    """Return the matrix product, written to `out` if that is not None."""
    if is_torch(left):
        return sys.modules["torch"].mm(left, right, out=out)
    if out is None:
        return namespace(left).matmul(left, right)
    return namespace(left).matmul(left, right, out=out)


def subtract_product(matrix: Array, left: Array, right: Array) -> Array:
    """Subtract left @ right from a matrix, in place if possible; return the matrix."""
    if is_torch(matrix):
        return matrix.addmm_(left, right, alpha=-1)
    if not isinstance(matrix, np.ndarray):
        matrix -= left @ right
        return matrix
    # In slices of 2**16 elements: a product as large as the gradient would be written to memory and
    # read back, and the C library returns buffers of that size to the system every time.
    rows = max(1, 2**16 // matrix.shape[1])
    for start in range(0, len(matrix), rows):
        matrix[start : start + rows] -= left[start : start + rows] @ right
    return matrix


def is_used(values: Array) -> bool:
    """Whether any value is not zero; waits for a device."""
    xp = namespace(values)
    # The first few values of a used gradient usually decide it, without a pass over all.
    return bool(xp.any(values[:_PROBE])) or bool(xp.any(values))


def full_fp32_matmul(like: Array) -> AbstractContextManager[Any]:
    """Compute float32 products in full float32, without overflow warnings; callers check that.

    Torch may compute them in lower precision (TF32, bfloat16, autocast). If the product a rank
    subtracts differs from the one in the mean, the difference is lost.
    """
    if is_torch(like):
        if sys.modules["torch"].compiler.is_compiling():
            return nullcontext()  # whoever captures a step decides the precision of its products
        return _float32_products(like.device.type)
    return np.errstate(all="ignore")


@contextmanager
def _float32_products(device: str) -> Iterator[None]:
    torch = sys.modules["torch"]
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            # torch has no autocast for the meta device, and is_autocast_enabled raises.
            if device != "meta" and torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    yield
            else:
                yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


class AsyncScalars:
    """A few numbers on a device, copied to the host asynchronously and read later.

    numbers : [n] float64
    """

    def __init__(self, numbers: Array) -> None:
        self._event: Any = None
        self._numbers = numbers
        # To pinned memory: otherwise a copy to the host blocks.
        if is_torch(numbers) and numbers.device.type == "cuda":
            torch = sys.modules["torch"]
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers; waits for the device if it has not computed them yet."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in to_host(self._numbers)]
