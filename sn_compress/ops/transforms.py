"""Orthonormal transforms of blocks, of any array library: what spectrum.py is for NumPy.

"fft"       the library's own; of a block, or of spans of it, see fourier.py
"dct"       DCT-II through a real FFT of the elements in another order (Makhoul 1980)
"hadamard"  additions only, in the order of spectrum.py, so with its bits
"identity"  none
and a DCT over some axes of a tensor, as products with small matrices.

NumPy's FFT is spectrum.py's, so that what NumPy computes here has the bits of the codec on a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..arrays import Array, Constant, namespace
from . import spectrum


class Transform:
    """One of them, of blocks of one length, and its tables.

    span : elements of each FFT, where a block is cut into several
    """

    def __init__(self, name: str, block: int, span: int | None = None) -> None:
        self.name, self.block = name, block
        self._span = spectrum.span_length(span, block)
        self._tables = _dct_tables(block) if name == "dct" else {}

    def forward(self, blocks: Array) -> Array:
        """Coefficients of each row, [rows, block] float32 -> [rows, bins * parts].

        May be its argument. Complex bins are pairs; imaginary parts of edge bins may be anything.
        """
        if self.name == "fft":
            if self._span == self.block:
                return spectrum.rfft(blocks)
            xp = namespace(blocks)
            return spectrum.join_spans(
                spectrum.rfft(xp.reshape(blocks, (-1, self._span))), self.block
            )
        if self.name == "dct":
            return self._dct(blocks)
        return _hadamard(blocks) if self.name == "hadamard" else blocks

    def inverse(self, coefficients: Array) -> Array:
        """[rows, block] float32 of their coefficients; may be its argument, and overwrite it."""
        if self.name == "fft":
            if self._span == self.block:
                return spectrum.irfft(coefficients, self.block)
            xp = namespace(coefficients)
            values = spectrum.irfft(spectrum.part_spans(coefficients, self._span), self._span)
            return xp.reshape(values, (-1, self.block))
        if self.name == "dct":
            return self._idct(coefficients)
        return _hadamard(coefficients) if self.name == "hadamard" else coefficients

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
        """[tensors, n] float32; `back` is the inverse."""
        xp = namespace(values)
        out = xp.reshape(values, (values.shape[0], *self.shape))
        for axis, matrix in zip(self.axes, self._matrices[back], strict=True):
            order = [at for at in range(len(self.shape) + 1) if at != axis + 1] + [axis + 1]
            matrix_transpose = xp.permute_dims(out, tuple(order))
            rows = xp.reshape(matrix_transpose, (-1, self.shape[axis])) @ matrix.on(values)
            matrix_transpose = xp.reshape(rows, tuple(matrix_transpose.shape))
            out = xp.permute_dims(
                matrix_transpose, tuple(order.index(at) for at in range(len(order)))
            )
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
    """Orders and factors of both ways.

    With V the FFT of the even elements, then the odd ones backwards, and Z_k = V_k exp(-i pi k /
    2 n), coefficient k is the real part of Z_k, and coefficient n - k less its imaginary part,
    times the square root of 2 but for k = 0.
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


def _hadamard(values: Array) -> Array:
    xp = namespace(values)
    rows, block = values.shape
    half, out = 1, values
    while half < block:
        pairs = xp.reshape(out, (rows, block // (2 * half), 2, half))
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        out = xp.stack([left + right, left - right], axis=2)
        half *= 2
    return xp.reshape(out, (rows, block)) * float(np.float32(block**-0.5))
