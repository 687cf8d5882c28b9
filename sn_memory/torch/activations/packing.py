"""Pack floats into 1, 2, 4 or 8 bits on their own device, with torch ops.

Uses the same grids, random numbers and codes as the host's C++ (sn_compress/ops/groups.py, whose
NumPy version is the oracle): groups of 256 elements with a lowest point and a step, rounded
stochastically. Each run starts a new group, so that no group spans two rows. Random numbers are a
hash of key and position, so they need no memory and are the same on every machine. The host keeps
escaped elements in a list; the device would have to wait for its length, so it differs in two
points: a group with an element that is not finite is unpacked as NaN, and with 1 bit a group of
both signs has no zero on its grid.

No control flow depends on values, and nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
import torch

from sn_compress.ops import groups

from ...base.errors import core
from ..model.modes import warn

GROUP: Final = 256
# Elements packed at a time without a fused kernel, which takes ten temporaries of four bytes for
# each. A multiple of the group.
_CHUNK: Final = 1 << 20
UNFIT: Final = 2.0**120  # from here on a group is lost; on the host the element escapes
_FINEST: Final = 2.0**-110  # groups.FINEST


@dataclass(frozen=True)
class Packed:
    """[n] floats in groups.

    bases, steps : [groups] float32 and bfloat16: the lowest point of each grid, and the distance
        between its points.
    codes : [ceil(n bits / 8)] uint8, lowest bits first
    spread : [groups] float32: the sum over a group of f (1 - f), where f is an element's distance
        to the grid point below it in steps; times step**2 it is the variance of the rounding.
    """

    bases: torch.Tensor
    steps: torch.Tensor
    codes: torch.Tensor
    spread: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors needed for unpacking."""
        return self.bases.nbytes + self.steps.nbytes + self.codes.nbytes

    def variance(self, n: int) -> torch.Tensor:
        """Return the mean variance of the rounding over all n elements, a scalar on the device."""
        return (self.steps.double().square() * self.spread.double()).nansum() / max(n, 1)


def pack(values: torch.Tensor, bits: int, key: tuple[int, int], run: int = 0) -> Packed:
    """Round values stochastically to codes.

    values : [n] float32, float16 or bfloat16, contiguous
    bits : 1, 2, 4 or 8
    key : two 32-bit words that identify seed and tensor
    run : elements after which a new group and a new byte of codes start; divides n. 0: n
    """
    n, device = values.numel(), values.device
    parts = groups.Parts(n, bits, GROUP, run, _CHUNK)
    count, width = parts.at(n)
    packed = Packed(
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.bfloat16, device=device),
        torch.empty(width, dtype=torch.uint8, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
    )
    if (fused := kernels(device)) is not None:
        fused.pack(values, bits, key, parts.run, *vars(packed).values())
        return packed
    for start, stop, inner in map(parts.part, range(parts.count)):
        rows, held = parts.slices(start, stop)
        base, step, codes, spread = _pack(values[start:stop].view(-1, inner), start, bits, key)
        packed.bases[rows], packed.steps[rows], packed.spread[rows] = base, step, spread
        packed.codes[held] = codes
    return packed


def unpack(packed: Packed, n: int, bits: int, dtype: torch.dtype, run: int = 0) -> torch.Tensor:
    """Return the values of codes as [n] of the given dtype."""
    device = packed.codes.device
    values = torch.empty(n, dtype=dtype, device=device)
    parts = groups.Parts(n, bits, GROUP, run, _CHUNK)
    if (fused := kernels(device)) is not None:
        fused.unpack(packed.bases, packed.steps, packed.codes, bits, parts.run, values)
        return values
    for start, stop, inner in map(parts.part, range(parts.count)):
        rows, held = parts.slices(start, stop)
        runs = (stop - start) // inner
        filled = inner + -inner % (8 // bits)  # a run's codes and the padding of its last byte
        codes = unpack_codes(packed.codes[held], runs * filled, bits).view(runs, filled)
        codes = _filled(codes[:, :inner], GROUP).view(-1, GROUP)
        value = packed.bases[rows, None] + codes.float() * packed.steps[rows, None].float()
        values[start:stop].view(runs, inner).copy_(value.view(runs, -1)[:, :inner])
    return values


@lru_cache
def kernels(device: torch.device) -> Any:
    """Return the module of Triton kernels if they run on a device, else None."""
    if device.type != "cuda":
        return None
    try:
        from . import kernels as fused

        # Compile now, before anything depends on it: a machine may have Triton but no compiler.
        probe = torch.zeros(GROUP, device=device)
        out = (probe[:1].clone(), probe[:1].bfloat16(), probe.byte(), probe[:1].clone())
        fused.pack(probe, 8, (0, 0), GROUP, *out)
    except Exception as error:  # noqa: BLE001 - Triton's and its compilers' have no common base
        warn(
            f"activations on {device} are packed by array code, some ten times slower than by "
            f"Triton's kernels, which do not run here: {type(error).__name__}: {error}"
        )
        return None
    return fused


Test = Literal["above zero or NaN", "above zero", "not zero"]
"""What a bit of a mask says of an element."""
TESTS: Final[dict[Test, Callable[[torch.Tensor], torch.Tensor]]] = {
    "above zero or NaN": lambda values: ~(values <= 0),
    "above zero": lambda values: values > 0,
    "not zero": lambda values: values != 0,
}
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_mask(values: torch.Tensor, test: Test) -> torch.Tensor:
    """Return a bit mask of the [n] values that pass a test, [ceil(n / 8)] uint8, low bits first."""
    n, number = values.numel(), list(TESTS).index(test)
    bits = torch.empty(-(-n // 8), dtype=torch.uint8, device=values.device)
    if values.device.type == "cpu":
        core().pack_mask(as_numpy(values), str(values.dtype)[6:], number, bits.numpy())
        return bits
    for start in range(0, n, _CHUNK):
        part = pack_codes(TESTS[test](values[start : start + _CHUNK]).view(torch.uint8), 1)
        bits[start // 8 : start // 8 + part.numel()] = part
    return bits


def spread_mask(bits: torch.Tensor, values: torch.Tensor | float, out: torch.Tensor) -> None:
    """Fill [n] with values (a tensor of the same type, or one number) where a bit is set, else 0.

    Elements are masked as integers, so that NaN also becomes +0; a product would keep it.
    """
    wide = _WORDS[out.element_size()]
    source, word = None, 0
    if isinstance(values, torch.Tensor):
        source = values
    else:
        word = int(torch.tensor([values], dtype=out.dtype).view(wide))
    if out.device.type == "cpu":
        size = out.element_size()
        held = None if source is None else as_numpy(source)
        core().spread_mask(bits.numpy(), held, size, word & (1 << 8 * size) - 1, as_numpy(out))
        return
    for start in range(0, out.numel(), _CHUNK):
        part = out[start : start + _CHUNK].view(wide)
        on = unpack_codes(bits[start // 8 :][: -(-part.numel() // 8)], part.numel(), 1)
        on = -on.view(torch.int8).to(wide)
        part.copy_(on & (word if source is None else source[start : start + _CHUNK].view(wide)))


def two_values(values: torch.Tensor) -> float | None:
    """Return c if all [n] values are 0 or c, else None."""
    if values.device.type == "cpu":
        word = core().two_values(as_numpy(values), str(values.dtype)[6:])
        kind = np.uint32 if values.element_size() == 4 else np.uint16
        held = torch.from_numpy(np.array([max(word, 0)], kind)).view(values.dtype)
        return None if word < 0 or bool(held.isnan()) else float(held)
    # This waits for the device. Not reached for dropout, which saves a boolean mask on devices.
    low, high = (float(value) for value in values.aminmax()) if values.numel() else (0.0, 0.0)
    top = low if high == 0 else high
    return top if bool(((values == 0) | (values == top)).all()) else None


def as_numpy(run: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a host tensor as an array; bfloat16, which NumPy lacks, as its bits in uint16."""
    return np.asarray((run.view(torch.uint16) if run.dtype == torch.bfloat16 else run).numpy())


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


def _filled(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """[runs, n] with each run zero-padded to a multiple of elements."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % multiple)).contiguous()


def _pack(
    values: torch.Tensor, first: int, bits: int, key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bases, steps, codes and spread of up to `_CHUNK` values in runs, [runs, length]."""
    n, top = values.shape[1], float((1 << bits) - 1)
    # The last group of a run is padded with its last element, which changes neither the group's
    # extremes nor whether it has a zero.
    x = torch.cat([values.float(), values[:, -1:].float().expand(-1, -n % GROUP)], 1)
    x = x.view(-1, GROUP)
    fits = x.abs() < UNFIT
    x = torch.where(fits, x, 0.0)
    base, step = _grid(x.amin(1), x.amax(1), (x == 0).any(1), top)
    scaled = ((x - base[:, None]) * (1.0 / step)[:, None]).clamp(0.0, top)
    fraction = groups.fraction_of(bits)
    luck = _halves(first, values.numel(), key, values.device).view(values.shape)
    luck = _filled(luck, GROUP).view(-1, GROUP) >> (16 - fraction)
    points = (scaled * 2.0**fraction).round().int()
    codes = ((points + luck) >> fraction).to(torch.uint8)
    part = scaled - scaled.floor()
    spread = part * (1 - part)
    spread.view(values.shape[0], -1)[:, n:] = 0
    base = torch.where(fits.all(1), base, torch.nan)
    packed = pack_codes(_filled(codes.view(values.shape[0], -1)[:, :n], 8 // bits).view(-1), bits)
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
    # Rounded up to a bfloat16, so that the grid still covers the group.
    step = ((step.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).clamp(min=_FINEST)
    return torch.where(lattice, -below * step, low), step


def _halves(first: int, n: int, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """[n] random 16-bit numbers as int32, for positions from `first` on; two per 32-bit word."""
    # lowbias32, as in groups.py. int32 wraps around as uint32 does, for which torch has no
    # arithmetic; its shifts extend the sign, which masks undo.
    pair = first >> 1
    other = _signed(key[1] + (pair >> 32) * 0x85EBCA6B)
    x = torch.arange((first + n + 1 >> 1) - pair, dtype=torch.int32, device=device)
    x = (x + _signed(pair)) * _signed(0x9E3779B9) + _signed(key[0])
    x ^= other
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return torch.stack([x & 0xFFFF, (x >> 16) & 0xFFFF], 1).view(-1)[first & 1 :][:n]


def _signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
