"""The kernels of packing.py in Triton: one pass over memory each way. Imported only with Triton.

Counterparts of `packing._pack` and of the loop in `packing.unpack`; tests compare them in Triton's
interpreter. Divisions are rounded to nearest and products are not fused with sums, so that codes
are bit-identical on all devices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # groups per program: 4,096 elements, i.e. 32 per thread of four warps


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    values, bases, steps, codes, spread, groups, run, key, other,
    BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = 8 // BITS
    TOP: tl.constexpr = 2.0**BITS - 1
    FRACTION: tl.constexpr = 16 if BITS < 8 else 15  # groups.fraction_of
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Groups per run, the number of the run, and the start of the group within it.
    groups_per_run = (run + 255) // 256
    number, start = row // groups_per_run, row % groups_per_run * 256
    at = (number * run + start)[:, None] + tl.arange(0, 256)[None, :]
    valid = (start[:, None] + tl.arange(0, 256)[None, :] < run) & (row[:, None] < groups)
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

    scaled = (x - base[:, None]) * tl.div_rn(tl.zeros_like(step) + 1.0, step)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, 0.0), TOP)
    part = scaled - tl.floor(scaled)
    # The rounds of lowbias32, a hash of 32 bits by C. Wellons, with two words of the key mixed in.
    pair = at >> 1
    word = pair.to(tl.uint32) * 0x9E3779B9 + key
    word = word ^ (other + (pair >> 32).to(tl.uint32) * 0x85EBCA6B)
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    word = word ^ (word >> 16)
    luck = (word >> ((at & 1) * 16).to(tl.uint32)) & 0xFFFF
    # Below 2**23: the sum is rounded to nearest, ties to even.
    points = (scaled * 2.0**FRACTION + 8388608.0) - 8388608.0
    code = (points.to(tl.int32) + (luck >> (16 - FRACTION)).to(tl.int32)) >> FRACTION
    code = tl.where(valid, code, 0)
    error = tl.sum(tl.where(valid, part * (1 - part), 0.0), axis=1)

    some = row < groups
    tl.store(bases + row, tl.where(lost == 1, float("nan"), base), mask=some)
    tl.store(steps + row, step.to(tl.bfloat16), mask=some)
    tl.store(spread + row, error, mask=some)
    shifted = tl.reshape(code, (ROWS, 256 // PER, PER)) << (tl.arange(0, PER) * BITS)[None, None, :]
    place = start[:, None] + (tl.arange(0, 256 // PER) * PER)[None, :]
    byte = (number * ((run + PER - 1) // PER))[:, None] + place // PER
    tl.store(codes + byte, tl.sum(shifted, axis=2).to(tl.uint8), mask=(place < run) & some[:, None])


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    bases, steps, codes, values, groups, run, BITS: tl.constexpr, ROWS: tl.constexpr
):
    PER: tl.constexpr = 8 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups_per_run = (run + 255) // 256
    number, start = row // groups_per_run, row % groups_per_run * 256
    place = start[:, None] + tl.arange(0, 256)[None, :]
    valid = (place < run) & (row[:, None] < groups)
    byte = (number * ((run + PER - 1) // PER))[:, None] + place // PER
    held = tl.load(codes + byte, mask=valid, other=0).to(tl.int32)
    code = (held >> ((place % PER) * BITS).to(tl.int32)) & (2**BITS - 1)
    base = tl.load(bases + row, mask=row < groups, other=0.0)
    step = tl.load(steps + row, mask=row < groups, other=0.0).to(tl.float32)
    value = base[:, None] + code.to(tl.float32) * step[:, None]
    at = (number * run)[:, None] + place
    tl.store(values + at, value.to(values.dtype.element_ty), mask=valid)


def pack(
    values: torch.Tensor,
    bits: int,
    key: tuple[int, int],
    run: int,
    bases: torch.Tensor,
    steps: torch.Tensor,
    codes: torch.Tensor,
    spread: torch.Tensor,
) -> None:
    """Fill bases, steps, codes and spread from [n] values in runs: see `packing.pack`."""
    groups = bases.numel()
    if groups:
        _pack[(triton.cdiv(groups, _ROWS),)](
            values, bases, steps, codes, spread, groups, run, *_words(key), BITS=bits, ROWS=_ROWS,
            enable_fp_fusion=False,
        )  # fmt: skip


def unpack(
    bases: torch.Tensor,
    steps: torch.Tensor,
    codes: torch.Tensor,
    bits: int,
    run: int,
    values: torch.Tensor,
) -> None:
    """Fill [n] values from codes: see `packing.unpack`."""
    groups = bases.numel()
    if groups:
        _unpack[(triton.cdiv(groups, _ROWS),)](
            bases, steps, codes, values, groups, run, BITS=bits, ROWS=_ROWS, enable_fp_fusion=False
        )


def _words(key: tuple[int, int]) -> tuple[int, int]:
    """The key as int32 words, since Triton takes larger integers as 64-bit ones."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in key)  # type: ignore[return-value]
