"""How a vector is cut into blocks of equal size, and where their records lie in a payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...ops.records.layout import Layout

Floats = npt.NDArray[np.float32]

CHUNK = 1 << 18  # elements worked on at a time: 1 MiB, inside a core's second-level cache
_SMALLEST = 32


@dataclass(frozen=True)
class Section:
    """A run of equal blocks: elements start..stop of the vector, the last block padded."""

    start: int
    stop: int
    count: int  # blocks
    layout: Layout
    words_at: int  # offset in the body, 32-bit words

    def records(self, body: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """The section's part of a body, [count, layout.words]; a view."""
        end = self.words_at + self.count * self.layout.words
        return body[self.words_at : end].reshape(self.count, self.layout.words)

    def chunks(self) -> range:
        """First blocks of the pieces to work on at a time."""
        return range(0, self.count, self.chunk)

    @property
    def chunk(self) -> int:
        """Blocks worked on at a time."""
        return max(1, CHUNK // self.layout.block)

    def blocks(self, array: npt.NDArray[Any], first: int, last: int) -> Floats:
        """Blocks first..last as [blocks, block] float32; copied only to cast or pad."""
        block = self.layout.block
        part = array[self.start + first * block : min(self.start + last * block, self.stop)]
        part = part.astype(np.float32, copy=False)
        if part.size < (last - first) * block:
            padded = np.zeros((last - first) * block, np.float32)
            padded[: part.size] = part
            part = padded
        return part.reshape(last - first, block)

    def row(self, vector: npt.NDArray[Any], index: int) -> npt.NDArray[Any]:
        """What of a block is in the vector: [m], m <= block; a view."""
        start = self.start + index * self.layout.block
        return vector[start : min(start + self.layout.block, self.stop)]

    def room(self, out: Floats, first: int, last: int) -> Floats:
        """Where to write blocks first..last: [blocks, block], in `out` itself if all are full."""
        block = self.layout.block
        start, stop = self.start + first * block, self.start + last * block
        if stop > self.stop:
            return np.empty((last - first, block), np.float32)
        return out[start:stop].reshape(last - first, block)

    def put(self, blocks: Floats, out: Floats, first: int) -> None:
        """Write blocks that begin with the section's block `first` into the vector `out`.

        Nothing to do for what `room` gave of `out` itself.
        """
        if np.may_share_memory(blocks, out):
            return
        start = self.start + first * self.layout.block
        stop = min(start + blocks.size, self.stop)
        out[start:stop] = blocks.reshape(-1)[: stop - start]


def cut(
    n: int, block: int | None, whole: Callable[[int], int], layout: Callable[[int], Layout]
) -> list[Section]:
    """Sections of n elements: full blocks, then the rest padded to a power of two.

    block : size of the full blocks, or None for one block of `whole(n)` elements
    layout : gives the layout of a block of some size
    """
    cuts, start = [], 0
    if block and n >= block:
        start = n // block * block
        cuts.append((0, start, n // block, block))
    if rest := n - start:
        length = max(_SMALLEST, 1 << (rest - 1).bit_length() if block else whole(rest))
        cuts.append((start, n, 1, length))
    sections, at = [], 0
    for first, stop, count, length in cuts:
        sections.append(Section(first, stop, count, layout(length), at))
        at += count * sections[-1].layout.words
    return sections
