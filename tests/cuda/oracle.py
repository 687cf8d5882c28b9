"""What a record holds: the array code over NumPy, as the oracle of the kernels."""

from __future__ import annotations

import numpy as np

from sn_compress.ops.launch import Format
from sn_compress.ops.quantize import Layout
from sn_compress.ops.record_arrays import Records


def make_format(
    block: int,
    transform: str,
    theta: float,
    values: str = "range",
    bits: int = 8,
    mantissa: int = 3,
    positions: str = "elias-fano",
    span: int | None = None,
) -> Format:
    """A format that keeps 1 - theta of the bins."""
    parts = 2 if transform in ("fft", "spectrum") else 1
    bins = block // 2 + 1 if parts == 2 else block
    kept = bins if positions == "all" else max(1, bins - int(bins * theta))
    layout = Layout(block, kept, values, bits, mantissa, positions, parts)
    return Format.of(layout, transform, span)


def encode(
    coefs: np.ndarray, memory: np.ndarray | None, form: Format, decay: float, top: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """[nb, floats] float32 -> words [nb, words], residual [nb, floats], saturated."""
    # A residual comes with a memory; adding -0.0 changes no number, nor the sign of a zero.
    kept = np.full_like(coefs, -0.0) if memory is None else memory
    with np.errstate(all="ignore"):
        encoded = Records(form.layout, clear_edges=False).encode(coefs, kept, decay, top)
    return encoded.words.astype(np.uint32), encoded.residual, int(encoded.saturated.sum())


def decode(words: np.ndarray, form: Format) -> np.ndarray:
    """[nb, words] of sound records -> coefficients [nb, floats] float32; NaN where marked."""
    records, pairs = (
        Records(form.layout),
        np.zeros((len(words) * form.layout.bins, form.layout.parts)),
    )
    decoded = records.decode(words.astype(np.int64))
    out = records.add(pairs.astype(np.float32), decoded, 1.0).reshape(len(words), -1)
    out[decoded.missing] = np.nan
    return out
