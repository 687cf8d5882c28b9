"""Real FFT of blocks, orthonormal, so that energies in both domains agree (Parseval).

Of a block of b reals, b // 2 + 1 complex bins are kept; all but the first and (for even b) the
last stand for a conjugate pair and count twice in the energy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.fft

Spectrum = npt.NDArray[np.complex64]
Floats = npt.NDArray[np.float32]


def bins(block: int) -> int:
    """Number of complex bins of a block of `block` reals."""
    return block // 2 + 1


def forward(blocks: Floats) -> Spectrum:
    """[nb, b] float32 -> [nb, bins(b)] complex64."""
    # float32 in, complex64 out: SciPy keeps single precision, NumPy's own FFT did not always.
    return scipy.fft.rfft(blocks, axis=-1, norm="ortho")  # type: ignore[no-any-return]


def inverse(spectrum: Spectrum, block: int) -> Floats:
    """[nb, bins(b)] complex64 -> [nb, b] float32. The input may be overwritten."""
    return scipy.fft.irfft(  # type: ignore[no-any-return]
        spectrum, n=block, axis=-1, norm="ortho", overwrite_x=True
    )


def energy(spectrum: Spectrum, block: int) -> float:
    """Squared norm of the blocks that have this spectrum, summed in float64."""
    parts = spectrum.view(np.float32).astype(np.float64) ** 2  # [nb, 2f]
    total = 2 * parts.sum() - parts[:, :2].sum()
    if block % 2 == 0:
        total -= parts[:, -2:].sum()
    return float(total)


def fast_length(n: int) -> int:
    """The smallest length >= n with no prime factor above 5: quick in every FFT library."""
    return int(scipy.fft.next_fast_len(n, real=True)) if n else 0
