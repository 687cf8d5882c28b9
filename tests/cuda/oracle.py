"""What a record holds: the NumPy form of ops/record.py, as the oracle of the kernels."""

from __future__ import annotations

import numpy as np

from sn_compress.ops import record
from sn_compress.ops.launch import Format
from sn_compress.ops.quantize import Layout


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


def layout_of(form: Format) -> Layout:
    """The layout of a format; where all coefficients travel, no positions do."""
    return Layout(
        form.block,
        form.kept,
        form.values,
        form.code_bits,
        form.mantissa,
        form.positions,
        form.parts,
    )


def encode(
    coefs: np.ndarray, memory: np.ndarray | None, form: Format, decay: float, top: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """[nb, floats] float32 -> words [nb, words], residual [nb, floats], saturated."""
    words, left = np.empty((len(coefs), form.words), np.uint32), coefs.copy()
    kept = None if memory is None else memory.copy()
    tally = record.encode_twin(left, kept, words, layout_of(form), decay, top)
    return words, left if kept is None else kept, tally.saturated


def decode(words: np.ndarray, form: Format) -> np.ndarray:
    """[nb, words] of sound records -> coefficients [nb, floats] float32; NaN where marked."""
    out = np.zeros((len(words), form.bins * form.parts), np.float32)
    record.decode_twin(words, out, layout_of(form), 1.0)
    return out
