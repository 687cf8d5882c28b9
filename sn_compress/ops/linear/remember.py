"""Gradient plus what was not sent before it, in one pass where there is a buffer for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ...devices import _native
from ...devices.arrays import (
    Array,
    host_threads,
    host_view,
    is_fixed,
    is_torch,
    namespace,
    squared_norm,
    to_host,
)

_CHUNK = 1 << 18  # elements whose squares are summed by themselves, whatever the threads


def remember(memory: Array, gradient: Array, decay: float, out: Array | None = None) -> Array:
    """Memory * decay + gradient, [n] float32.

    out : another buffer of [n] float32 to write into, neither of the two
    """
    if is_torch(memory):
        return sys.modules["torch"].add(gradient, memory, alpha=decay, out=out)
    if is_fixed(memory):
        return (memory if decay == 1 else memory * decay) + gradient
    xp = namespace(memory)
    part = memory if decay == 1 else xp.multiply(memory, xp.float32(decay), out=out)
    return xp.add(part, gradient, out=out)


def remembered(
    memory: Array, gradient: Array, decay: float, out: Array | None = None
) -> tuple[Array, Array]:
    """What `remember` returns, and the sum of its squares, 0-d float32.

    On a host the extension makes both in one pass; the order of its sums is no library's.
    """
    held, new, core = host_view(memory), host_view(gradient), None
    if held is not None and new is not None:
        core = _native.core()
    if held is None or new is None or core is None:
        vector = remember(memory, gradient, decay, out)
        return vector, squared_norm(vector)
    xp = namespace(memory)
    vector = xp.empty_like(memory) if out is None else out
    into = to_host(vector)
    pieces = range(0, max(into.size, 1), _CHUNK)

    def work(starts: Iterator[int]) -> list[tuple[int, float]]:
        found = []
        for start in starts:
            here = slice(start, start + _CHUNK)
            found.append((start, core.remember(held[here], new[here], float(decay), into[here])))
        return found

    shares = _native.parallel(work, pieces, host_threads(memory))
    squares = sorted(each for share in shares for each in share)
    energy = sum(square for _, square in squares)
    return vector, xp.asarray(energy, dtype=xp.float32)
