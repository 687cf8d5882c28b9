"""Buckets: a vector cut into rows of equal length, each with statistics of its own.

One scale for a whole tensor makes its largest element set the step of all others; a scale per
bucket costs 32 bits per row and keeps the step local.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def count(n: int, bucket: int | None) -> int:
    """Buckets in n elements; None is one bucket for all."""
    if bucket is None:
        return min(n, 1)
    return -(-n // bucket)


def lengths(n: int, bucket: int | None) -> npt.NDArray[np.int64]:
    """Elements in each bucket, [nb] int64; the last may be shorter."""
    full = np.full(count(n, bucket), n if bucket is None else bucket, np.int64)
    if bucket is not None and n % bucket:
        full[-1] = n % bucket
    return full


def rows(values: Floats, bucket: int | None) -> Floats:
    """[n] -> [nb, bucket], the last row filled with zeros."""
    nb = count(values.size, bucket)
    if bucket is None or values.size == nb * bucket:
        return values.reshape(nb, -1) if nb else values.reshape(0, bucket or 0)
    padded = np.zeros((nb, bucket), np.float32)
    padded.reshape(-1)[: values.size] = values
    return padded


def spread(per_bucket: npt.NDArray[np.float32], n: int, bucket: int | None) -> Floats:
    """One number per bucket -> [n], repeated over its elements."""
    return np.repeat(per_bucket, lengths(n, bucket))


def finite(rows: Floats) -> npt.NDArray[np.bool_]:
    """Which rows hold only finite numbers, [nb]."""
    return np.asarray(np.isfinite(rows).all(axis=1), np.bool_)
