"""Vectors cut into rows and back."""

from __future__ import annotations

import numpy as np

from sn_compress.ops import codes


def test_buckets_keep_their_order_and_the_last_is_short():
    x = np.arange(7, dtype=np.float32)
    assert codes.bucket_rows(x, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 0]]
    assert codes.bucket_lengths(7, 3).tolist() == [3, 3, 1]
    assert codes.bucket_spread(np.array([1, 2, 3], np.float32), 7, 3).tolist() == [
        1,
        1,
        1,
        2,
        2,
        2,
        3,
    ]
    assert codes.bucket_count(0, None) == codes.bucket_count(0, 3) == 0
