"""Floats in 1, 2, 4 or 8 bits where they are: array code of torch for any device.

The same grids, random numbers and codes as the host's C++ (sn_compress/ops/groups.py,
whose NumPy form is the oracle): groups of 256 elements with a lowest point and a step, rounded up
with the probability of the distance. Random numbers are a hash of key and position, so nothing is
kept of them, and a step draws the same ones on every machine. Two things are other than on the
host, as a list of escaped elements would make the device wait for its length: a group with an
element that is not finite comes back as NaN, and with 1 bit a group of both signs has no zero on
its grid.

Nothing here depends on values: no branch, no copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch

from ..model.modes import warn

GROUP: Final = 256
# Elements of which temporaries exist at a time, where no fused kernel does the work: ten numbers of
# four bytes for each. A multiple of the group.
_CHUNK: Final = 1 << 20
UNFIT: Final = 2.0**120  # from here on a group is lost, as on the host an element escapes
_FINEST: Final = 2.0**-110


@dataclass(frozen=True)
class Packed:
    """[n] floats in groups.

    Attributes
    ----------
    bases, steps
        [groups] float32 and bfloat16: the lowest point of each grid, the distance of two points.
    codes
        [ceil(n bits / 8)] uint8, lowest bits first.
    spread
        [groups] float32: the sum over a group of f (1 - f), where f is how far an element is from
        the point below it in steps; times step**2 the variance of its rounding.
    """

    bases: torch.Tensor
    steps: torch.Tensor
    codes: torch.Tensor
    spread: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of what is needed to unpack."""
        return self.bases.nbytes + self.steps.nbytes + self.codes.nbytes

    def variance(self, n: int) -> torch.Tensor:
        """Return the mean variance of the rounding over all n elements, a scalar on the device."""
        return (self.steps.double().square() * self.spread.double()).nansum() / max(n, 1)


def pack(values: torch.Tensor, bits: int, key: tuple[int, int]) -> Packed:
    """Round values at random to codes.

    Parameters
    ----------
    values
        [n] float32, float16 or bfloat16, contiguous.
    bits
        1, 2, 4 or 8.
    key
        Two words of 32 bits that stand for seed and tensor.
    """
    n, device = values.numel(), values.device
    groups = -(-n // GROUP)
    packed = Packed(
        torch.empty(groups, dtype=torch.float32, device=device),
        torch.empty(groups, dtype=torch.bfloat16, device=device),
        torch.empty(-(-n * bits // 8), dtype=torch.uint8, device=device),
        torch.empty(groups, dtype=torch.float32, device=device),
    )
    if (fused := kernels(device)) is not None:
        fused.pack(values, bits, key, packed.bases, packed.steps, packed.codes, packed.spread)
        return packed
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        rows = slice(start // GROUP, -(-stop // GROUP))
        base, step, codes, spread = _pack(values[start:stop], start, bits, key)
        packed.bases[rows], packed.steps[rows], packed.spread[rows] = base, step, spread
        packed.codes[start * bits // 8 : -(-stop * bits // 8)] = codes
    return packed


def unpack(packed: Packed, n: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of codes, [n] of a type."""
    device = packed.codes.device
    values = torch.empty(n, dtype=dtype, device=device)
    if (fused := kernels(device)) is not None:
        fused.unpack(packed.bases, packed.steps, packed.codes, bits, values)
        return values
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        rows = slice(start // GROUP, -(-stop // GROUP))
        held = packed.codes[start * bits // 8 : -(-stop * bits // 8)]
        codes = unpack_codes(held, stop - start, bits)
        codes = torch.nn.functional.pad(codes, (0, -codes.numel() % GROUP)).view(-1, GROUP)
        value = packed.bases[rows, None] + codes.float() * packed.steps[rows, None].float()
        values[start:stop] = value.view(-1)[: stop - start]
    return values


@lru_cache
def kernels(device: torch.device) -> Any:
    """Return the module of Triton's kernels where they run on a device; None elsewhere."""
    if device.type != "cuda":
        return None
    try:
        from . import kernels as fused

        # Compiled once before anything depends on it: a machine may have Triton and no compiler.
        probe = torch.zeros(GROUP, device=device)
        out = (probe[:1].clone(), probe[:1].bfloat16(), probe.byte(), probe[:1].clone())
        fused.pack(probe, 8, (0, 0), *out)
    except Exception as error:  # noqa: BLE001 - Triton's and its compilers' have no common base
        warn(
            f"activations on {device} are packed by array code, some ten times slower than by "
            f"Triton's kernels, which do not run here: {type(error).__name__}: {error}"
        )
        return None
    return fused


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Return [n] booleans as [ceil(n / 8)] uint8, lowest bit first."""
    if mask.device.type != "cpu":
        return pack_codes(mask.view(torch.uint8), 1)
    packed = np.packbits(mask.numpy(), bitorder="little")
    # In memory that torch has handed out, as all that is counted.
    return torch.empty(packed.size, dtype=torch.uint8).copy_(torch.from_numpy(packed))


def part_size(device: torch.device) -> int:
    """Elements that masks are made of at a time, a multiple of 8.

    Temporaries of all at once were the peak of a small net's step. On a device a launch costs what
    the host needs for a part.
    """
    return 1 << 14 if device.type == "cpu" else _CHUNK


def pack_where(values: torch.Tensor, test: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return where [n] values meet a test as [ceil(n / 8)] uint8, lowest bit first."""
    n = values.numel()
    bits = torch.empty(-(-n // 8), dtype=torch.uint8, device=values.device)
    size = part_size(values.device)
    for start in range(0, n, size):
        part = pack_bits(test(values[start : start + size]))
        bits[start // 8 : start // 8 + part.numel()] = part
    return bits


def spread_bits(packed: torch.Tensor, n: int, value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return [n] of a type: a value where a bit is set, and 0."""
    values = torch.empty(n, dtype=dtype, device=packed.device)
    size = part_size(packed.device)
    for start in range(0, n, size):
        part = values[start : start + size]
        torch.mul(
            unpack_bits(packed[start // 8 :][: -(-part.numel() // 8)], part.numel()),
            value,
            out=part,
        )
    return values


def unpack_bits(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Return [n] booleans."""
    if packed.device.type != "cpu":
        return unpack_codes(packed, n, 1).view(torch.bool)
    wide = np.unpackbits(packed.numpy(), count=n, bitorder="little")
    return torch.from_numpy(wide.view(np.bool_))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return [n] uint8 below 2**bits as [ceil(n bits / 8)] uint8, lowest bits first."""
    per = 8 // bits
    rows = torch.nn.functional.pad(codes, (0, -codes.numel() % per)).view(-1, per)
    packed = rows[:, 0].clone()
    for place in range(1, per):
        packed |= rows[:, place] << (place * bits)
    return packed


def unpack_codes(packed: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    """Return [n] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)[:n]


def _pack(
    values: torch.Tensor, first: int, bits: int, key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bases, steps, codes and spread of up to `_CHUNK` values, the first at position `first`."""
    n, top = values.numel(), float((1 << bits) - 1)
    padding = -n % GROUP
    # What the last group is filled up with changes neither its extremes nor whether it has a zero.
    x = torch.cat([values.float(), values[-1:].float().expand(padding)]).view(-1, GROUP)
    fits = x.abs() < UNFIT
    x = torch.where(fits, x, 0.0)
    base, step = _grid(x.amin(1), x.amax(1), (x == 0).any(1), top)
    scaled = ((x - base[:, None]) / step[:, None]).clamp(0.0, top)
    below = scaled.to(torch.int32)
    part = scaled - below
    luck = _words(first, x.numel(), key, values.device).view(-1, GROUP)
    codes = below + (((luck >> 8) & 0xFFFFFF).float() < part * 2.0**24).to(torch.int32)
    spread = part * (1 - part)
    if padding:
        codes[-1, GROUP - padding :] = 0
        spread[-1, GROUP - padding :] = 0
    base = torch.where(fits.all(1), base, torch.nan)
    packed = pack_codes(codes.view(-1)[:n].to(torch.uint8), bits)
    return base, step.to(torch.bfloat16), packed, spread.sum(1)


def _grid(
    low: torch.Tensor, high: torch.Tensor, zero: torch.Tensor, top: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest point and step of each group's grid: see `choose` of the oracle, without a bound."""
    both = (low < 0) & (high > 0)
    lattice = zero & (low < 0)
    below, inner = torch.full_like(low, top), -low / top
    if top > 1:
        share = torch.floor(top * -low / (high - low))
        a, b = share.clamp(1.0, top - 1), (share + 1).clamp(1.0, top - 1)
        step_a = torch.maximum(-low / a, high / (top - a))
        step_b = torch.maximum(-low / b, high / (top - b))
        below = torch.where(both, torch.where(step_a <= step_b, a, b), below)
        inner = torch.where(both, torch.minimum(step_a, step_b), inner)
    else:
        lattice &= ~both
    step = torch.where(lattice, inner, (high - low) / top)
    # Up to a number of the eight bits that a bfloat16 has, so that the grid still holds the group.
    step = ((step.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).clamp(min=_FINEST)
    return torch.where(lattice, -below * step, low), step


def _words(first: int, n: int, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """[n] random words of 32 bits as int32, of the positions from `first` on."""
    # int32 wraps around as uint32 does, which torch has no arithmetic for; shifts are masked.
    other = _signed(key[1] + (first >> 32) * 0x85EBCA6B)
    x = torch.arange(n, dtype=torch.int32, device=device) + _signed(first)
    x = x * _signed(0x9E3779B9) + _signed(key[0])
    x ^= (x >> 17) & 0x7FFF
    x *= _signed(0xED5AD4BB)
    x ^= (x >> 11) & 0x1FFFFF
    x += other
    x *= _signed(0xAC4C1B51)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x31848BAB)
    return x ^ ((x >> 14) & 0x3FFFF)


def _signed(word: int) -> int:
    """A word of 32 bits as the int32 of the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
