"""The kernels of packing.py in Triton: one pass over memory each way. Imported where there is one.

Twins of `packing._pack` and of the loop of `packing.unpack`; tests compare them in Triton's
interpreter. Divisions are rounded to nearest and products are not fused with sums, so that codes
have the bits they have everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # groups of a program: 4,096 elements, of which four warps have 32 a thread


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    values, bases, steps, codes, spread, n, key, other, BITS: tl.constexpr, ROWS: tl.constexpr
):
    PER: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = 2.0**BITS - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    valid = at < n
    x = tl.load(values + at, mask=valid, other=0.0).to(tl.float32)
    fits = tl.abs(x) < 1.329227995784916e36  # 2**120; not so for NaN
    lost = tl.max(tl.where(valid & (fits == 0), 1, 0), axis=1)
    x = tl.where(fits, x, 0.0)
    low = tl.min(tl.where(valid, x, float("inf")), axis=1)
    high = tl.max(tl.where(valid, x, float("-inf")), axis=1)
    zero = tl.max(tl.where(valid & (x == 0), 1, 0), axis=1) == 1

    both = (low < 0) & (high > 0)
    lattice = zero & (low < 0)
    below = tl.zeros_like(low) + TOP
    inner = tl.div_rn(-low, tl.zeros_like(low) + TOP)
    if BITS > 1:
        share = tl.floor(tl.div_rn(TOP * -low, high - low))
        a = tl.minimum(tl.maximum(share, 1.0), TOP - 1)
        b = tl.minimum(tl.maximum(share + 1, 1.0), TOP - 1)
        step_a = tl.maximum(tl.div_rn(-low, a), tl.div_rn(high, TOP - a))
        step_b = tl.maximum(tl.div_rn(-low, b), tl.div_rn(high, TOP - b))
        below = tl.where(both, tl.where(step_a <= step_b, a, b), below)
        inner = tl.where(both, tl.minimum(step_a, step_b), inner)
    else:
        lattice = lattice & (both == 0)
    step = tl.where(lattice, inner, tl.div_rn(high - low, tl.zeros_like(low) + TOP))
    upper = (step.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000
    step = tl.maximum(upper.to(tl.float32, bitcast=True), 7.703719777548943e-34)  # 2**-110
    base = tl.where(lattice, -below * step, low)

    wide_step = tl.broadcast_to(step[:, None], (ROWS, 256))
    scaled = tl.div_rn(x - base[:, None], wide_step)
    scaled = tl.minimum(tl.maximum(scaled, 0.0), TOP)
    floor = scaled.to(tl.int32)
    part = scaled - floor.to(tl.float32)
    # The rounds of triple32, a hash of 32 bits by C. Wellons, with two words of the key mixed in.
    word = at.to(tl.uint32) * 0x9E3779B9 + key
    word = word ^ (word >> 17)
    word = word * 0xED5AD4BB
    word = word ^ (word >> 11)
    word = word + other + (at >> 32).to(tl.uint32) * 0x85EBCA6B
    word = word * 0xAC4C1B51
    word = word ^ (word >> 15)
    word = word * 0x31848BAB
    word = word ^ (word >> 14)
    # 24 bits, as many as a float32 holds exactly.
    up = (word >> 8).to(tl.float32) < part * 16777216.0
    code = tl.where(valid, floor + tl.where(up, 1, 0), 0)
    error = tl.sum(tl.where(valid, part * (1 - part), 0.0), axis=1)

    some = row * 256 < n
    tl.store(bases + row, tl.where(lost == 1, float("nan"), base), mask=some)
    tl.store(steps + row, step.to(tl.bfloat16), mask=some)
    tl.store(spread + row, error, mask=some)
    shifted = tl.reshape(code, (ROWS, 256 // PER, PER)) << (tl.arange(0, PER) * BITS)[None, None, :]
    byte = row[:, None] * (256 // PER) + tl.arange(0, 256 // PER)[None, :]
    tl.store(codes + byte, tl.sum(shifted, axis=2).to(tl.uint8), mask=byte * PER < n)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    bases, steps, codes, values, n, BITS: tl.constexpr, SIZE: tl.constexpr
):
    PER: tl.constexpr = 8 // BITS
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    valid = at < n
    byte = tl.load(codes + at // PER, mask=valid, other=0).to(tl.int32)
    code = (byte >> ((at % PER) * BITS).to(tl.int32)) & (2**BITS - 1)
    base = tl.load(bases + at // 256, mask=valid, other=0.0)
    step = tl.load(steps + at // 256, mask=valid, other=0.0).to(tl.float32)
    value = base + code.to(tl.float32) * step
    tl.store(values + at, value.to(values.dtype.element_ty), mask=valid)


def pack(
    values: torch.Tensor,
    bits: int,
    key: tuple[int, int],
    bases: torch.Tensor,
    steps: torch.Tensor,
    codes: torch.Tensor,
    spread: torch.Tensor,
) -> None:
    """Fill bases, steps, codes and spread of [n] values: see `packing.pack`."""
    n = values.numel()
    if n:
        grid = (triton.cdiv(n, 256 * _ROWS),)
        _pack[grid](
            values, bases, steps, codes, spread, n, *_words(key), BITS=bits, ROWS=_ROWS,
            enable_fp_fusion=False,
        )  # fmt: skip


def unpack(
    bases: torch.Tensor, steps: torch.Tensor, codes: torch.Tensor, bits: int, values: torch.Tensor
) -> None:
    """Fill [n] values from codes: see `packing.unpack`."""
    n = values.numel()
    if n:
        grid = (triton.cdiv(n, 256 * _ROWS),)
        _unpack[grid](
            bases, steps, codes, values, n, BITS=bits, SIZE=256 * _ROWS, enable_fp_fusion=False
        )


def _words(key: tuple[int, int]) -> tuple[int, int]:
    """The key as Triton takes whole numbers: what lies above 2**31 would make them of 64 bits."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in key)  # type: ignore[return-value]
