"""Reading saved states, which come from files that may be truncated, forged, or something else.

The obvious loader indexes into what it gets and lets Python complain: a KeyError here, an
allocation of terabytes there, and half of it loaded. Here any fault is one CompressError, sizes are
checked against the arrays at hand before anything is allocated, and nothing changes before all was
read.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import CompressError

_DEPTH = 32  # of nested dicts and lists; ours have eight levels
# What a wrong state raises where it is used; not BaseException, as Ctrl-C is no fault of a file.
_FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
           ValueError, Warning, zipfile.BadZipFile)  # fmt: skip


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise what goes wrong inside as a CompressError that names what was read."""
    try:
        yield
    except CompressError:
        raise
    except _FAULTS as error:
        raise CompressError(
            f"{what} cannot be loaded ({type(error).__name__}: {error}); expected what "
            "state_dict() returned, unchanged"
        ) from error


def held(node: Any, depth: int = 0) -> int:
    """Elements of all arrays in dicts and lists, to check the sizes in a state against.

    Raises CompressError for arrays that repeat elements by strides of zero, as a copy of one would
    allocate them all, and for a state that is nested too deeply.
    """
    if depth > _DEPTH:
        raise CompressError(f"a saved state of more than {_DEPTH} levels; expected a state_dict()")
    if isinstance(node, dict):
        return sum(held(value, depth + 1) for value in node.values())
    if isinstance(node, (list, tuple)):
        return sum(held(value, depth + 1) for value in node)
    if isinstance(node, np.ndarray):
        steps, shape = node.strides, node.shape
    elif callable(getattr(node, "stride", None)):  # a tensor of torch, which has no name here
        steps, shape = node.stride(), tuple(node.shape)
    else:
        return 1 if isinstance(node, (int, float)) else 0
    if any(step == 0 and size > 1 for step, size in zip(steps, shape, strict=True)):
        raise CompressError(
            f"a saved array of shape {shape} repeats its elements; expected each in memory"
        )
    return math.prod(shape)


def count(value: Any, what: str, *, low: int = 0, high: int = 2**62) -> int:
    """A saved whole number, or CompressError."""
    if isinstance(value, np.integer):
        value = int(value)
    # True is an int for Python.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CompressError(f"a saved {what} is {value!r}; expected {low} to {high}")
    return value


def shape(value: Any, what: str) -> tuple[int, ...]:
    """A saved shape, of at most 2**48 elements, or CompressError."""
    if not isinstance(value, (list, tuple)):
        raise CompressError(f"a saved {what} is {value!r}; expected a list of sizes")
    # 2**48 elements are more than any memory holds; 64 axes are NumPy's limit.
    sizes = tuple(count(size, what, high=2**48) for size in value)
    if math.prod(sizes) > 2**48 or len(sizes) > 64:
        raise CompressError(f"a saved {what} is {value!r}; expected at most 2**48 elements")
    return sizes


def floats(value: Any, what: str, size: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return a copy of a saved array of this shape as float32; CompressError unless finite."""
    array = np.asarray(value)
    if array.shape != size or (array.size and array.dtype.kind not in "iuf"):
        raise CompressError(
            f"saved {what} has shape {array.shape} and dtype {array.dtype}; expected {size}, "
            "float32. Was it saved with other settings, or for another layer?"
        )
    with np.errstate(over="ignore"):  # of float64 beyond float32, which is Inf below
        copy = np.array(array, np.float32, order="C")
    if not np.isfinite(copy).all():
        raise CompressError(f"saved {what} holds NaN or Inf; load another, or none")
    return copy


def arrays_of(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file as np.savez writes it, by name, as views of its bytes.

    `np.load` allocates an array of the size that its header declares before it reads.

    Raises CompressError if it is not such a file, or an array not of the size of its bytes.
    """
    arrays = {}
    with reading("the file"), zipfile.ZipFile(io.BytesIO(data)) as file:
        for entry in file.infolist():
            # A compressed entry may be a thousand times as large as the file.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                raise CompressError(
                    f"{entry.filename!r} is compressed; expected a file of np.savez"
                )
            stream = io.BytesIO(file.read(entry))
            major, _ = np.lib.format.read_magic(stream)
            read = {
                1: np.lib.format.read_array_header_1_0,
                2: np.lib.format.read_array_header_2_0,
            }[major]
            sizes, by_columns, dtype = read(stream)
            body = stream.read()
            if dtype.hasobject or math.prod(sizes) * dtype.itemsize != len(body):
                raise CompressError(
                    f"{entry.filename!r} declares {sizes} of {dtype}, contains {len(body)} bytes"
                )
            array = np.frombuffer(body, dtype) if body else np.zeros(0, dtype)  # no empty one
            arrays[entry.filename.removesuffix(".npy")] = array.reshape(
                sizes, order="F" if by_columns else "C"
            )
    return arrays
