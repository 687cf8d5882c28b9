"""Groups of floats on a grid of 2, 4, 16 or 256 points, stochastically rounded: unbiased, bounded.

Rounding to nearest is biased once a step is as wide as the spread of the values, and results
computed from many such values are then off in one direction. Here each element is rounded up with a
probability equal to its distance from the point below, so that errors average out. A group's grid
is as fine as its values allow, never coarser than the bound; elements off the grid escape, i.e. are
stored exactly. If a group contains zeros, zero is on its grid, or, at one bit, zeros escape if both
signs have more elements: zeros stay zero.

Random numbers are a hash of (key, position), 32 bits for two elements (rounds of multiply and shift
with the constants of C. Wellons' lowbias32): any part can be computed by itself, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from . import codes

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[np.float32] | npt.NDArray[np.float16] | npt.NDArray[np.uint16]
"""float32, float16, or the bits of bfloat16, which NumPy has no type for."""
Steps = npt.NDArray[np.uint16]

WIDTHS = (1, 2, 4, 8)
UNFIT = 0x7B800000  # bits of 2**120: elements from there on, and NaN, escape
FINEST = np.float32(2.0**-110)
_EDGE = np.float32(2.0**-10)  # of a step
_TILE, _TILE_ROWS = 256, 32  # size of a tile in C++: elements of a row, and rows
_CHUNK = 1 << 18  # elements a thread processes at a time: a multiple of every group size


class Grids(NamedTuple):
    """The result of `pack` for [n] values in ng groups.

    bases : [ng] float32, the lowest point of each grid
    steps : [ng] uint16, upper halves of the float32 distances between adjacent points
    spread : [ng] uint32, the sum over a group of g (256 - g), where g / 256 is the distance of an
        element from the point below; times step**2 / 65536, the variance of the group's rounding
    codes : [packed_bytes(n, bits)] uint8
    at, values : positions, ascending int64, and values of the elements that escape
    zeros : number of zero elements, int64; counted with `spread`
    """

    bases: Floats
    steps: Steps
    spread: npt.NDArray[np.uint32]
    codes: codes.Bytes
    at: npt.NDArray[np.int64]
    values: Floats
    zeros: np.int64

    def variance(self, n: int) -> float:
        """Return the mean variance of the rounding, over all n elements."""
        exact = np.asarray(step_values(self.steps), np.float64)
        return float(np.dot(exact * exact, self.spread) / 65536 / max(n, 1))


def step_values(steps: Steps) -> Floats:
    """Convert steps to floats, [ng] float32."""
    return (steps.astype(np.uint32) << 16).view(np.float32)


def fraction_of(bits: int) -> int:
    """Return the bits of a distance above a point; with the code's, at most 23 (decision 110)."""
    return min(16, 23 - bits)


def keys(seed: int, step: int) -> tuple[int, int]:
    """Return two words that represent (seed, step) in the hash; both are from 0 to 2**64 - 1."""
    key = seed & 0xFFFFFFFF, seed >> 32
    return _word(2 * step, key), _word(2 * step + 1, key)


def _word(at: int, key: tuple[int, int]) -> int:
    """Return the random word of one position; see `random_words`."""
    other = key[1] + (at >> 32) * 0x85EBCA6B
    x = (at * 0x9E3779B9 + key[0] ^ other) & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def pack(
    values: Values, bits: int, group: int, bound: float, key: tuple[int, int], threads: int = 1,
    into: tuple[Floats, Steps, codes.Bytes] | None = None, run: int = 0, look: bool = True,
) -> Grids:  # fmt: skip
    """Round n floats to codes.

    values : of any shape, in C order; a view with permuted axes is not copied, see `Turn`
    bits : 1, 2, 4 or 8
    group : a power of two from 32 to 65536
    bound : above 2**-100; the error of every element is below it, or the element escapes
    into : the caller's memory for bases, steps and codes, of the sizes from `Parts.at`
    run : number of elements, dividing n, after which a new group and byte of codes begin; 0: n
    look : whether to compute the variance; if not, packing is faster, `spread` empty, `zeros` 0
    """
    core = _native.core()
    turn = Turn.of(values, run, group) if core else None
    parts = Parts(values.size, bits, group, run, _most(turn, run, threads))
    if into is None:
        ng, width = parts.at(values.size)
        into = np.empty(ng, np.float32), np.empty(ng, np.uint16), np.empty(width, np.uint8)
    grids = (into[0], into[1], np.empty(into[0].size if look else 0, np.uint32), into[2])
    flat = turn.memory if turn else np.ascontiguousarray(values).ravel()
    kind, numbers = _kind(flat), turn.numbers if turn else ()

    def work(chunks: Iterator[int]) -> list[tuple[int, bytes, bytes, int]]:
        packed = []
        for chunk in chunks:
            start, stop, inner = parts.part(chunk)
            here, bytes_ = parts.slices(start, stop)
            spread = grids[2][here] if look else None
            target: list[Any] = [grids[0][here], grids[1][here], spread, grids[3][bytes_]]
            if core is None:
                wide = _widened(flat[start:stop])
                at, lost, zeros = _pack_twin(wide, start, inner, bits, group, bound, key, target)
            else:
                some, strides = (flat, (stop - start, *numbers)) if turn else (flat[start:stop], ())
                at, lost, zeros = core.pack_groups(
                    some, kind, *target, start, inner, bits, group, bound, *key, strides
                )
            packed.append((chunk, at, lost, zeros))
        return packed

    # Threads take parts from a queue; escapes must ascend, whichever thread was faster.
    shares = _native.parallel(work, range(parts.count), threads)
    packed = sorted((part for share in shares for part in share), key=lambda part: part[0])
    at = np.frombuffer(b"".join(part[1] for part in packed), np.int64)
    lost = np.frombuffer(b"".join(part[2] for part in packed), np.float32)
    return Grids(*grids, at, lost, np.int64(sum(part[3] for part in packed)))


def unpack(
    bases: Floats, steps: Steps, packed: codes.Bytes, n: int, bits: int, group: int,
    threads: int = 1, out: Values | None = None, run: int = 0,
) -> Values:  # fmt: skip
    """Return the values of codes, [n], in `out` or a new float32 array, without escapes.

    out : n elements of any shape, in C order; a view with permuted axes is not copied, see `Turn`
    """
    out = np.empty(n, np.float32) if out is None else out
    core = _native.core()
    turn = Turn.of(out, run, group) if core else None
    flat = turn.memory if turn else np.ascontiguousarray(out).ravel()
    kind, numbers = _kind(flat), turn.numbers if turn else ()
    parts = Parts(n, bits, group, run, _most(turn, run, threads))

    def work(chunks: Iterator[int]) -> None:
        for chunk in chunks:
            start, stop, inner = parts.part(chunk)
            here, bytes_ = parts.slices(start, stop)
            if core is None:
                filled = -(-inner * bits // 8) * 8 // bits  # codes of a run, padded to whole bytes
                got = codes.unpack_codes(packed[bytes_], (stop - start) // inner * filled, bits)
                got = got.reshape(-1, filled)[:, :inner].ravel()
                lengths = np.diff(_starts(got.size, inner, group), append=got.size)
                base = np.repeat(bases[here], lengths)
                step = np.repeat(step_values(steps[here]), lengths)
                with np.errstate(all="ignore"):  # a corrupt payload may contain anything
                    flat[start:stop] = narrowed(base + got.astype(np.float32) * step, out.dtype)
            else:
                some, strides = (flat, (stop - start, *numbers)) if turn else (flat[start:stop], ())
                core.unpack_groups(
                    bases[here], steps[here], packed[bytes_], some, kind, start, inner, bits, group,
                    strides,
                )  # fmt: skip

    _native.parallel(work, range(parts.count), threads)
    if not np.may_share_memory(flat, out):
        out[...] = flat.reshape(out.shape)
    return out


class Turn(NamedTuple):
    """A view with permuted axes, packed in tiles by C++: see struct Turn in csrc/compress/groups.h.

    memory : its [n] elements in memory order, not copied
    numbers : sizes and strides by which C++ locates the elements of a row
    """

    memory: npt.NDArray[Any]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, values: npt.NDArray[Any], run: int, group: int) -> Turn | None:
        """Return the turn of a view whose rows are runs; None if contiguous, or a copy is needed.

        Rows and runs may have up to two axes each; the innermost axis of one must be contiguous.
        """
        # A tile in C++ has 256 elements of a row, and groups must not be split.
        if values.flags.c_contiguous or not run or group > _TILE:
            return None
        memory = values.transpose(np.argsort([-stride for stride in values.strides], kind="stable"))
        rows: list[tuple[int, int]] = []
        runs: list[tuple[int, int]] = []
        inner = 1
        # From the innermost axis outwards: axes of runs until a run is complete, then those of
        # rows; adjacent axes that are contiguous in memory are merged.
        for size, stride in reversed(list(zip(values.shape, values.strides, strict=True))):
            axes = runs if inner < run else rows
            inner *= size
            step = stride // values.itemsize
            if axes and step == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0] * size, axes[-1][1])
            elif size > 1:
                axes.append((size, step))
        rows, runs = rows or [(1, 1)], runs or [(1, 1)]
        contiguous = rows[0][1] == 1 or runs[0][1] == 1
        few = len(rows) < 3 and len(runs) < 3 and prod(size for size, _ in runs) == run
        if not (memory.flags.c_contiguous and few and contiguous):
            return None
        far_row, far = (axes[1][1] if len(axes) > 1 else 0 for axes in (rows, runs))
        return cls(memory.ravel(), (rows[0][0], far_row, rows[0][1], runs[0][0], far, runs[0][1]))


def _most(turn: Turn | None, run: int, threads: int) -> int:
    """Return the maximum part a thread takes at a time: of a `Turn`, rows that fill tiles."""
    if threads < 2 and _native.core():
        return 1 << 62  # C++ processes everything in one call
    tiles = _TILE_ROWS * run
    return max(_CHUNK // tiles, 1) * tiles if turn else _CHUNK


class Parts:
    """[n] elements in runs, split at group boundaries into parts of at most `most` elements."""

    def __init__(self, n: int, bits: int, group: int, run: int, most: int = _CHUNK) -> None:
        self.n, self.bits, self.group, self.run = n, bits, group, run or max(n, 1)
        # Pieces of a run if it is longer than `most`, else as many whole runs as fit.
        self._step = most if self.run > most else most // self.run * self.run
        self._of_run = -(-self.run // most) if self.run > most else 0
        self.count = n // self.run * self._of_run or -(-n // self._step)

    def part(self, number: int) -> tuple[int, int, int]:
        """Return the start and stop of a part, and the length of the runs in it."""
        if not self._of_run:
            start = number * self._step
            return start, min(start + self._step, self.n), self.run
        outer, inner = divmod(number, self._of_run)
        start = outer * self.run + inner * self._step
        stop = min(start + self._step, (outer + 1) * self.run)
        return start, stop, stop - start

    def at(self, element: int) -> tuple[int, int]:
        """Return the number of groups and of bytes of codes before the first element of a group."""
        runs, remainder = divmod(element, self.run)
        groups = runs * -(-self.run // self.group) + remainder // self.group
        return groups, runs * -(-self.run * self.bits // 8) + remainder * self.bits // 8

    def slices(self, start: int, stop: int) -> tuple[slice, slice]:
        """Return the slices of groups and of bytes of codes for a range of elements."""
        (group, byte), (last, end) = self.at(start), self.at(stop)
        return slice(group, last), slice(byte, end)


def _starts(n: int, run: int, group: int) -> npt.NDArray[np.int64]:
    """Return the start of each group of [n] elements in runs."""
    return (np.arange(0, n, run)[:, None] + np.arange(0, run, group)).ravel()


def _pack_twin(
    values: Floats, first: int, run: int, bits: int, group: int, bound: float,
    key: tuple[int, int], parts: list[Any],
) -> tuple[bytes, bytes, int]:  # fmt: skip
    """Pack in NumPy, bit-identically; writes `parts`, returns escapes as bytes, and zeros."""
    n, top = values.size, np.float32(2**bits - 1)
    starts = _starts(n, run, group)
    lengths = np.diff(starts, append=n)
    words = values.view(np.int32)
    magnitude = words & 0x7FFFFFFF
    fit = magnitude < UNFIT
    cap = _half_down(min(bound, 2.0**120))
    # Make the bits of floats order like integers: reverse the order of negative numbers.
    keys_ = words ^ ((words >> 31) & 0x7FFFFFFF)
    info = np.iinfo(np.int32)
    low = np.minimum.reduceat(np.where(fit, keys_, info.max), starts)
    high = np.maximum.reduceat(np.where(fit, keys_, info.min), starts)
    zeros = np.add.reduceat(magnitude == 0, starts, dtype=np.int64)
    below = np.add.reduceat(fit & (values < 0), starts, dtype=np.int64)
    fits = np.add.reduceat(fit, starts, dtype=np.int64)
    # Two points with zero cover one sign only: zeros escape if they are fewer than either side.
    zeros_escape = (bits == 1) & (zeros > 0) & (zeros < np.minimum(below, fits - zeros - below))
    some = fits > 0
    base, step = choose(
        np.where(some, _floats(low), np.float32(0)),
        np.where(some, _floats(high), np.float32(0)),
        (zeros > 0) & ~zeros_escape, 2**bits - 1, cap,
    )  # fmt: skip
    zeros_escape &= base == _floats(low)
    fit &= (magnitude > 0) | ~np.repeat(zeros_escape, lengths)
    bases, steps = np.repeat(base, lengths), np.repeat(step, lengths)
    exact = np.where(fit, values, bases)
    with np.errstate(over="ignore"):
        # Multiply by the inverse of the step, as C++ does, which divides once per group (decision
        # 110): the bits must be equal.
        raw = (exact - bases) * np.repeat(np.float32(1) / step, lengths)
    # Elements off the grid get an arbitrary code; their escapes overwrite the result.
    q = np.minimum(np.maximum(raw, np.float32(0)), top)
    # On the grid up to rounding error. Farther off, its end may be within the bound, but biased.
    on = (raw > -_EDGE) & (raw < top + _EDGE)
    # Add a random integer and truncate the fraction: rounds up with a probability equal to the
    # distance, without a comparison.
    fraction = fraction_of(bits)
    points = np.rint(q * np.float32(2**fraction)).astype(np.int32)
    code = points + (random_halves(first, n, key) >> (16 - fraction)) >> fraction
    error = (bases + code.astype(np.float32) * steps) - exact
    good = fit & on & (np.abs(error) < np.float32(bound))
    g = (points + (1 << (fraction - 9)) >> (fraction - 8)) & 255
    spread = np.where(good, g * (256 - g), 0).astype(np.uint32)
    parts[0][:] = base
    parts[1][:] = step.view(np.uint32) >> 16
    if parts[2] is not None:
        parts[2][:] = np.add.reduceat(spread, starts)
    filled = np.pad(code.reshape(-1, run), ((0, 0), (0, -run % (8 // bits))))
    parts[3][:] = codes.pack_codes(filled.ravel(), bits)
    at = np.flatnonzero(~good)
    counted = int(zeros.sum()) if parts[2] is not None else 0
    return (at + first).astype(np.int64).tobytes(), values[at].tobytes(), counted


def _kind(values: npt.NDArray[Any]) -> str:
    return "bfloat16" if values.dtype == np.uint16 else str(values.dtype)


def _widened(values: npt.NDArray[Any]) -> Floats:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


def narrowed(values: Floats, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round float32 to float16 or the bits of bfloat16, to nearest, ties to even."""
    if dtype != np.uint16:
        return values.astype(dtype)
    words = values.view(np.uint32)
    nearest = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return np.where(np.isnan(values), words >> 16 | 0x40, nearest).astype(np.uint16)


def choose(
    low: Floats, high: Floats, zero: npt.NDArray[np.bool_], levels: int, cap: np.float32
) -> tuple[Floats, Floats]:
    """Choose each group's lowest point and step, from its extremes and whether it has a zero.

    Without a zero, or if zero is the lowest value, the grid starts at the lowest value and spans
    the group. Else it has `below` points below zero: of two candidates, the one with the finer
    grid. Two points (one bit) are zero and the extreme farther from it, unless `pack` lets zeros
    escape. If the finest grid is coarser than `cap`, the bound, its step becomes `cap`, and it is
    placed where most of the group is likely to be: at its inner end, or around zero.
    """
    one = np.float32(1)
    top = np.float32(levels)
    both = (low < 0) & (high > 0)
    lattice = zero & (low < 0)
    with np.errstate(all="ignore"):  # formulas are also evaluated for groups they do not apply to
        if levels == 1:
            below = np.where(-low > high, one, np.float32(0))
            inner = np.where(-low > high, -low, high)
        else:
            share = np.floor(top * -low / (high - low))
            a = np.minimum(np.maximum(share, one), top - one)
            b = np.minimum(np.maximum(share + one, one), top - one)
            step_a = np.maximum(-low / a, high / (top - a))
            step_b = np.maximum(-low / b, high / (top - b))
            below = np.where(step_a <= step_b, a, b)
            inner = np.minimum(step_a, step_b)
        below = np.where(both, below, top)
        step = np.where(lattice, np.where(both, inner, -low / top), (high - low) / top)
        # Steps are upper halves of float32, rounded up: else a grid would not span its group.
        step = np.maximum(_half_up(step), FINEST)
        base = np.where(lattice, -below * step, low)
        half = np.floor((top + one) / np.float32(2))
        lower, upper = np.ceil(-low / cap), np.ceil(high / cap)
        below = np.where(lower <= half, lower, np.where(upper <= half, top - upper, half))
        capped = np.where(both, -below * cap, np.where(zero, -top * cap, high - top * cap))
        capped = np.where(low >= 0, low, capped)
        coarse = step > cap
    base = np.where(coarse, capped, base).astype(np.float32)
    return base, np.where(coarse, cap, step).astype(np.float32)


def random_words(first: int, n: int, key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Return the random words of n positions from `first` on, [n] uint32."""
    at = np.arange(first, first + n, dtype=np.uint64)
    other = np.uint32(key[1]) + (at >> np.uint64(32)).astype(np.uint32) * np.uint32(0x85EBCA6B)
    x = (at.astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key[0])) ^ other
    x ^= x >> 16
    x *= np.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= np.uint32(0x846CA68B)
    return np.asarray(x ^ (x >> 16), np.uint32)


def random_halves(first: int, n: int, key: tuple[int, int]) -> npt.NDArray[np.uint16]:
    """Return random halves of words from `first` on, [n] uint16; two per word, the lower first."""
    pair = first >> 1
    words = random_words(pair, (first + n + 1 >> 1) - pair, key)
    return words.astype("<u4").view("<u2")[first & 1 :][:n]


def _floats(keys_: npt.NDArray[np.int32]) -> Floats:
    return (keys_ ^ ((keys_ >> 31) & 0x7FFFFFFF)).view(np.float32)


def _half_up(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return ((values.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(
            np.float32
        )


def _half_down(value: float) -> np.float32:
    word = np.array([value], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.float32(word.view(np.float32)[0])
