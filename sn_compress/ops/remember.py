"""Gradient plus what was not sent before it, in one pass where there is a buffer for it."""

from __future__ import annotations

import sys

from ..arrays import Array, is_fixed, is_torch, namespace


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
