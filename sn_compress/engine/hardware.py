"""Whether ranks compute float32 products with the same bits: what a rank says of its hardware.

The order in which a library sums up a product hangs on the processor, the threads, the release. The
names of these are told, and a digest of a few products, as a name does not say which kernels a
library has taken. Ranks that say the same multiply the last factors in float32, others in one order
of float64, which takes longer (`sums/parts/low_rank.py`).
"""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from typing import Any

import numpy as np

from ..devices.arrays import Array, device_of, like_of, namespace, steady, to_host
from ..ops.linear.products import outer

# [rows, directions, columns]: below and above what kernels take at once, and odd ones.
_SHAPES = ((3, 2, 5), (64, 4, 64), (257, 7, 129), (1000, 16, 96), (96, 33, 1000))


def said(like: Array) -> list[tuple[str, str]]:
    """What ranks have to say alike, for arrays of the library and on the device of `like`.

    Brings a few numbers to the host; called at the start, and when ranks have come or gone.
    """
    library = namespace(like).__name__.rpartition(".")[2]
    return [
        ("array library", library),
        ("processor", f"{platform.machine()} {device_of(like)}"),
        ("products", _digest(like)),
    ]


def _digest(like: Array) -> str:
    found = hashlib.sha256()
    with steady(like):
        for rows, size, columns in _SHAPES:
            left, right = _factor(size, rows), _factor(size, columns)
            (made,) = outer([like_of(left, like)], [like_of(right, like)], None)
            found.update(to_host(made).tobytes())
    return found.hexdigest()[:16]


@lru_cache(maxsize=32)
def _factor(rows: int, columns: int) -> Any:
    """Numbers of all the bits of float32, the same on every machine."""
    whole = np.random.default_rng(rows * columns).integers(-(2**23), 2**23, (rows, columns))
    return (whole / 2**23).astype(np.float32)
