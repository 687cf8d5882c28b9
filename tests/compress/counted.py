"""Transforms that the codec of frequencies computes, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import scipy.fft

from sn_compress.codecs import fft

# A kernel, a matrix and a vector long enough to be compressed, elements in all.
SHAPES = ((16, 8, 3, 3), (64, 48), (65536,))


@contextmanager
def transforms() -> Iterator[Counter[str]]:
    """How often "dct" and "fft" are computed of gradients, and "none" is."""
    found: Counter[str] = Counter()
    encode_blocks, dctn = fft.encode_blocks, scipy.fft.dctn

    def of_blocks(transform, values, *others):
        found["none" if transform == "identity" else transform] += 1
        return encode_blocks(transform, values, *others)

    def of_axes(*given, **options):
        found["dct"] += 1
        found["none"] -= 1  # what comes behind it takes the coefficients as they are
        return dctn(*given, **options)

    with (
        mock.patch.object(fft, "encode_blocks", of_blocks),
        mock.patch.object(scipy.fft, "dctn", of_axes),
    ):
        yield found
