"""Validated reading of saved states, whose files may be truncated, forged, or something else.

The obvious loader indexes into what it gets and lets Python complain: a KeyError here, an
allocation of terabytes there, and a state that is half loaded. Here any fault is one CompressError,
sizes are checked against the arrays present before anything is allocated, and nothing changes until
everything was read.
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

_DEPTH = 32  # maximum nesting of dicts and lists; our states have eight levels
# What using a wrong state may raise; not BaseException, as Ctrl-C is not a fault of the file.
_FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
           ValueError, Warning, zipfile.BadZipFile)  # fmt: skip


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Re-raise errors of the body as a CompressError that names what was read."""
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
    """Return the number of elements of all arrays in nested dicts and lists.

    Sizes declared in a state are checked against it. Raises CompressError for arrays with zero
    strides, because a copy would allocate every repeated element, and for a state that is nested
    too deeply.
    """
    if depth > _DEPTH:
        raise CompressError(f"a saved state of more than {_DEPTH} levels; expected a state_dict()")
    if isinstance(node, dict):
        return sum(held(value, depth + 1) for value in node.values())
    if isinstance(node, (list, tuple)):
        return sum(held(value, depth + 1) for value in node)
    if isinstance(node, np.ndarray):
        steps, shape = node.strides, node.shape
    elif callable(getattr(node, "stride", None)):  # a torch tensor; torch is not imported here
        steps, shape = node.stride(), tuple(node.shape)
    else:
        return 1 if isinstance(node, (int, float)) else 0
    if any(step == 0 and size > 1 for step, size in zip(steps, shape, strict=True)):
        raise CompressError(
            f"a saved array of shape {shape} repeats its elements; expected each in memory"
        )
    return math.prod(shape)


def count(value: Any, what: str, *, low: int = 0, high: int = 2**62) -> int:
    """Return a saved integer; CompressError if it is not one."""
    if isinstance(value, np.integer):
        value = int(value)
    # In Python True is an int.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CompressError(f"a saved {what} is {value!r}; expected {low} to {high}")
    return value


def shape(value: Any, what: str) -> tuple[int, ...]:
    """Return a saved shape of at most 2**48 elements; CompressError if it is not one."""
    if not isinstance(value, (list, tuple)):
        raise CompressError(f"a saved {what} is {value!r}; expected a list of sizes")
    # 2**48 elements fit no memory; 64 axes are NumPy's limit.
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
    with np.errstate(over="ignore"):  # float64 beyond float32's range becomes Inf, caught below
        copy = np.array(array, np.float32, order="C")
    if not np.isfinite(copy).all():
        raise CompressError(f"saved {what} holds NaN or Inf; load another, or none")
    return copy


def arrays_of(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a file written by np.savez, by name, as views of its bytes.

    `np.load` would allocate each array at the size its header declares before reading it.

    Raises CompressError if it is not such a file, or an array's size does not match its bytes.
    """
    arrays = {}
    with reading("the file"), zipfile.ZipFile(io.BytesIO(data)) as file:
        for entry in file.infolist():
            # A compressed entry may expand to a thousand times the size of the file.
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
            # np.frombuffer refuses an empty buffer.
            array = np.frombuffer(body, dtype) if body else np.zeros(0, dtype)
            arrays[entry.filename.removesuffix(".npy")] = array.reshape(
                sizes, order="F" if by_columns else "C"
            )
    return arrays
