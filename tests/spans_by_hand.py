"""The oracle of spans in ops/spectrum.py: how their bins lie in a block, one by one."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def spans_joined(spectra: npt.NDArray[np.complex128], block: int) -> npt.NDArray[np.float64]:
    """Spectra of spans, [spans, span / 2 + 1], as those of blocks: [blocks, block + 2], pairs."""
    half = spectra.shape[1] - 1
    out = np.zeros((len(spectra) * 2 * half // block, block // 2 + 1), complex)
    for at, spectrum in enumerate(spectra):
        row, first = divmod(at * half, block // 2)
        out[row, first + 1 : first + half] = spectrum[1:half]
        edges = spectrum[0].real, spectrum[half].real
        if first:
            out[row, first] = complex(*edges) / math.sqrt(2)
        else:
            out[row, 0], out[row, -1] = edges
    return out.view(np.float64)


def spans_parted(bins: npt.NDArray[np.complex128], span: int) -> npt.NDArray[np.complex128]:
    """Inverse of spans_joined, from [blocks, block / 2 + 1]."""
    half, found = span // 2, []
    for row in bins:
        for first in range(0, len(row) - 1, half):
            packed = row[first] * math.sqrt(2)
            edges = (packed.real, packed.imag) if first else (row[0].real, row[-1].real)
            found.append([edges[0], *row[first + 1 : first + half], edges[1]])
    return np.array(found)
