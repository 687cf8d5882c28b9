"""The FFTs that codecs compute of gradients, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sn_compress.codecs import fft

# A kernel, a matrix and a vector long enough to be compressed; a section of blocks each.
SHAPES = ((16, 8, 3, 3), (64, 48), (65536,))


@contextmanager
def transforms() -> Iterator[list[str]]:
    """The names of the transforms computed of gradients, in order, "identity" where none is."""
    found: list[str] = []
    encode_blocks = fft.encode_blocks

    def counted(transform, *others):
        found.append(transform)
        return encode_blocks(transform, *others)

    with mock.patch.object(fft, "encode_blocks", counted):
        yield found
