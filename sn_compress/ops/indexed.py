"""Sparse vectors as lists: the k largest elements of each chunk, as indices and values.

`chunk=None` is one chunk for all, with indices from the start of the vector; with chunks, indices
are relative to the start of their chunk, so that they need few bits. The remainder of a vector is a
shorter chunk with its own k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import PayloadError
from . import codes

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Adjacent chunks of equal length: `count` of `length` elements, `kept` of each are sent."""

    start: int
    count: int
    length: int
    kept: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length


def runs(n: int, chunk: int | None, kept: Callable[[int], int]) -> list[Run]:
    """Split n elements into chunks: the full ones, then the remainder; at most two runs."""
    size = n if chunk is None else chunk
    full = n // size if size else 0
    cut = [(0, full, size)] if full else []
    if remainder := n - full * size:
        cut.append((full * size, 1, remainder))
    return [Run(start, count, length, kept(length)) for start, count, length in cut]


def total(cut: list[Run]) -> int:
    """Return the number of elements sent, over all runs."""
    return sum(run.count * run.kept for run in cut)


def largest(values: npt.NDArray[np.float32], k: int) -> Positions:
    """Return positions of each row's k largest magnitudes, ascending, [nb, k]; ties to the lower.

    The same result as a stable sort, in linear time. Bits of a float without its sign order like
    integers, so this is exact.
    """
    nb, length = values.shape
    # NaN has larger bits than any number, so a vector with NaN has k positions, too.
    magnitudes = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    if k == length:
        return np.broadcast_to(np.arange(length), (nb, length)).astype(np.int64)
    # All above the k-th largest, and as many of those equal to it, in order, as are still missing.
    threshold = np.partition(magnitudes, length - k, axis=1)[:, length - k, None]
    chosen = magnitudes > threshold
    missing = k - np.count_nonzero(chosen, axis=1)  # [nb] places left for equals
    row, column = np.nonzero(magnitudes == threshold)
    first = np.searchsorted(row, np.arange(nb))
    take = np.arange(row.size) - first[row] < missing[row]
    chosen[row[take], column[take]] = True
    return np.nonzero(chosen)[1].reshape(nb, k)


def select(values: npt.NDArray[np.float32], cut: list[Run]) -> tuple[Positions, Positions]:
    """Select each chunk's largest elements: return indices in chunks, positions in the vector."""
    indices, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for run in cut:
        inside = largest(values[run.start : run.stop].reshape(run.count, run.length), run.kept)
        indices.append(inside.reshape(-1))
        positions.append(_outside(inside, run))
    return np.concatenate(indices), np.concatenate(positions)


def locate(indices: Positions, cut: list[Run]) -> Positions:
    """Convert indices read from a payload to positions in the vector.

    Raises PayloadError unless the indices of each chunk ascend strictly and are below its length,
    so that no element is written twice or out of bounds.
    """
    positions, at = [np.zeros(0, np.int64)], 0
    for run in cut:
        inside = indices[at : at + run.count * run.kept].reshape(run.count, run.kept)
        at += inside.size
        # int64 indices in a forged payload may be negative, which NumPy counts from the end.
        ascending = (np.diff(inside, axis=1) > 0).all()
        if not (ascending and (inside >= 0).all() and (inside < run.length).all()):
            raise PayloadError(
                f"indices do not ascend strictly from 0 to below {run.length}. The payload was "
                "damaged or made by something else."
            )
        positions.append(_outside(inside, run))
    return np.concatenate(positions)


def index_bytes(cut: list[Run], bits: int) -> int:
    """Return the bytes of all indices at `bits` bits each; 32 and 64 are plain integers."""
    return codes.packed_bytes(total(cut), bits)


def write_indices(indices: Positions, bits: int) -> npt.NDArray[np.uint8]:
    """Encode indices with `bits` bits each."""
    if bits == 64:  # pack_codes takes up to 32 bits
        return np.ascontiguousarray(indices, "<i8").view(np.uint8)
    return codes.pack_codes(indices, bits)


def read_indices(data: npt.NDArray[np.uint8], count: int, bits: int) -> Positions:
    """Inverse of write_indices."""
    if bits == 64:
        return np.frombuffer(data.tobytes(), "<i8").astype(np.int64, copy=False)
    return codes.unpack_codes(data, count, bits).astype(np.int64)


def _outside(inside: Positions, run: Run) -> Positions:
    starts = run.start + run.length * np.arange(run.count, dtype=np.int64)
    return (inside + starts[:, None]).reshape(-1)
