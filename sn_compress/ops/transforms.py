"""Orthonormal transforms of blocks in any array library, like spectrum.py for NumPy.

"fft" and "hadamard" are spectrum.py's, so that with NumPy the results are bit-identical to the
codec's on a host; "dct" uses a real FFT of the reordered elements (Makhoul 1980), as most libraries
have no DCT. A DCT over axes of a tensor is computed by products with small matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..arrays import Array, Constant, namespace
from . import spectrum


class Transform:
    """One transform of blocks of one length, and its tables.

    span : elements of each FFT, if a block is split into several
    """

    def __init__(self, name: str, block: int, span: int | None = None) -> None:
        self.name, self.block = name, block
        self._fft = spectrum.transform("fft", span)
        self._tables = _dct_tables(block) if name == "dct" else {}

    def forward(self, blocks: Array) -> Array:
        """Return the coefficients of each row, [rows, block] float32 -> [rows, bins * parts].

        May return its argument. Complex bins are pairs; imaginary parts of edge bins are undefined.
        """
        if self.name == "fft":
            return self._fft.forward(blocks)
        if self.name == "dct":
            return self._dct(blocks)
        return spectrum.hadamard(blocks) if self.name == "hadamard" else blocks

    def inverse(self, coefficients: Array) -> Array:
        """Return [rows, block] float32 from coefficients; may overwrite or return its argument."""
        if self.name == "fft":
            return self._fft.inverse(coefficients, self.block)
        if self.name == "dct":
            return self._idct(coefficients)
        return spectrum.hadamard(coefficients) if self.name == "hadamard" else coefficients

    def _dct(self, blocks: Array) -> Array:
        xp = namespace(blocks)
        table = {name: table.on(blocks) for name, table in self._tables.items()}
        parts = spectrum.rfft(xp.take(blocks, table["order"], axis=1))
        real = xp.take(parts, table["bins"], axis=1) * table["real"]
        return real + xp.take(parts, table["next"], axis=1) * table["imaginary"]

    def _idct(self, coefficients: Array) -> Array:
        xp = namespace(coefficients)
        table = {name: table.on(coefficients) for name, table in self._tables.items()}
        low = xp.take(coefficients, table["lower"], axis=1)
        high = xp.take(coefficients, table["upper"], axis=1)
        real = low * table["cosines"] + high * table["upper sines"]
        imaginary = low * table["sines"] - high * table["upper cosines"]
        parts = xp.reshape(xp.stack([real, imaginary], axis=2), (coefficients.shape[0], -1))
        return xp.take(spectrum.irfft(parts, self.block), table["back"], axis=1)


class OverAxes:
    """DCT-II over some axes of tensors of one shape."""

    def __init__(self, shape: Sequence[int], axes: Sequence[int]) -> None:
        self.shape, self.axes = tuple(shape), tuple(axes)
        self._matrices = {
            back: [_matrix(self.shape[axis], back) for axis in axes] for back in (False, True)
        }

    def of(self, values: Array, *, back: bool) -> Array:
        """Transform [tensors, n] float32; `back` selects the inverse."""
        xp = namespace(values)
        out = xp.reshape(values, (values.shape[0], *self.shape))
        for axis, matrix in zip(self.axes, self._matrices[back], strict=True):
            # Move the axis to the end, so that a matrix product transforms it; then move it
            # back.
            order = [at for at in range(len(self.shape) + 1) if at != axis + 1] + [axis + 1]
            moved = xp.permute_dims(out, tuple(order))
            rows = xp.reshape(moved, (-1, self.shape[axis])) @ matrix.on(values)
            moved = xp.reshape(rows, tuple(moved.shape))
            out = xp.permute_dims(moved, tuple(order.index(at) for at in range(len(order))))
        return xp.reshape(out, tuple(values.shape))


@lru_cache(maxsize=64)
def _matrix(size: int, back: bool) -> Constant:
    """Return the matrix that rows of `size` elements are multiplied with, [size, size] float32."""
    elements, waves = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    matrix = np.cos(np.pi * waves * (2 * elements + 1) / (2 * size)) * math.sqrt(2 / size)
    matrix[:, 0] = math.sqrt(1 / size)
    return Constant(np.ascontiguousarray(matrix.T if back else matrix).astype(np.float32))


@lru_cache(maxsize=64)
def _dct_tables(block: int) -> dict[str, Constant]:
    """Return the gather indices and factors for both directions.

    With V the FFT of the even elements, then the odd ones reversed, and Z_k = V_k exp(-i pi k /
    2 n), coefficient k is the real part of Z_k, and coefficient n - k minus its imaginary part,
    times the square root of 2 except for k = 0.
    """
    waves = np.arange(block)
    half = block // 2
    order = np.concatenate([waves[0::2], waves[1::2][::-1]])
    bins = np.where(waves <= half, waves, block - waves)
    angles = np.pi * bins / (2 * block)
    roots = np.where(waves == 0, 1.0, math.sqrt(2))
    real = np.where(waves <= half, np.cos(angles), np.sin(angles)) * roots
    imaginary = np.where(waves <= half, np.sin(angles), -np.cos(angles)) * roots
    lower = np.arange(half + 1)
    turn = np.pi * lower / (2 * block)
    scale = np.where(lower == 0, 1.0, math.sqrt(0.5))
    upper = np.where(lower == 0, 0.0, scale)  # there is no coefficient n
    tables = {
        "order": order,
        "back": np.argsort(order),
        "bins": 2 * bins,
        "lower": lower,
        "upper": (block - lower) % block,
        "real": real.astype(np.float32),
        "imaginary": imaginary.astype(np.float32),
        "cosines": (np.cos(turn) * scale).astype(np.float32),
        "sines": (np.sin(turn) * scale).astype(np.float32),
        "upper cosines": (np.cos(turn) * upper).astype(np.float32),
        "upper sines": (np.sin(turn) * upper).astype(np.float32),
        "next": 2 * bins + 1,
    }
    return {name: Constant(table) for name, table in tables.items()}
