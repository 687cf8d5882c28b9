"""Vectors, settings and error bounds that the tests of the codec share."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import scipy.fft
from hypothesis import settings
from hypothesis import strategies as st
from record_bits import read_bitmap, read_elias_fano, words_to_bits
from spans_by_hand import spans_joined, spans_parted

from sn_compress import FFTCodec
from sn_compress.ops import bits as elias_fano
from sn_compress.ops.quantize import Layout

SIZES = (0, 1, 31, 32, 33, 63, 1000, 4095, 4096, 4097, 2**20 + 1)
U = 2.0**-24  # unit roundoff of float32
TINY = 2.0**-149  # the smallest float32 above zero

# Energies are sums of keys, each |c|**2 in float32 within 3 U (two squares and their sum), in runs
# of 4096 over 64 lanes: 64 additions, so a sum is within 68 U. The total is twice the sum of all
# keys less the ends, and at least half of what is subtracted from: twice that.
ENERGY = 2 * 68 * U

# Seeds are fixed, and a busy machine must not fail a test for being slow.
examples = settings(deadline=None, derandomize=True, max_examples=60, database=None)


def for_each(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Run a test for each value of an argument, as one item. A failure names the value.

    As an item each takes pytest a third of a millisecond, before a test is chosen: where there are
    thousands, collecting took longer than running them.
    """

    values = tuple(values)

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def each(**others: Any) -> None:
            for value in values:
                try:
                    test(**others, **{name: value})
                except BaseException as error:
                    error.add_note(f"{name} = {value}")
                    raise

        signature = inspect.signature(test)
        left = [it for it in signature.parameters.values() if it.name != name]
        # What pytest asks fixtures for.
        each.__signature__ = signature.replace(parameters=left)
        return each

    return decorate


def fft_error(block: int) -> float:
    """Relative error, in the 2-norm, of one float32 FFT of this length, scaling included.

    Higham, Accuracy and Stability, theorem 24.2: log2(n) (mu + gamma_4 (sqrt(2) + mu)) with
    twiddle factors good to mu <= 2 U, thus below 8 U a stage; a stage of radix 3, 4 or 5 costs no
    more than the two of radix 2 it stands for. Two more U for the orthonormal factor.
    """
    return (8 * math.ceil(math.log2(block)) + 2) * U


def transform_error(codec: FFTCodec, n: int) -> float:
    """Relative error, in the 2-norm, of the codec's float32 transform of n elements, one way.

    A DCT-II is a real FFT between additions of pairs and a rotation: two stages more. A stage of
    the Hadamard transform is one addition, its factor one rounding and one product. Over axes, a
    DCT along each follows the other.
    """
    if codec.transform == "axes":
        return sum(dct_error(codec.shape[axis]) for axis in codec.axes)
    one = {
        "fft": fft_error,
        "dct": dct_error,
        "hadamard": lambda block: (math.log2(block) + 2) * U,
        "identity": lambda block: 0.0,
    }[codec.transform]
    return max((one(s.layout.block) for s in codec.sections(n)), default=0.0)


def dct_error(block: int) -> float:
    return fft_error(block) + 16 * U


def exact_transform(codec: FFTCodec, blocks: np.ndarray) -> np.ndarray:
    """The codec's coefficients of [rows, block] float64 in float64, [rows, bins * parts]."""
    span, block = codec.span or blocks.shape[1], blocks.shape[1]
    if codec.transform == "fft" and span < block:
        return spans_joined(scipy.fft.rfft(blocks.reshape(-1, span), norm="ortho"), block)
    if codec.transform == "fft":
        return scipy.fft.rfft(blocks, norm="ortho").view(np.float64)
    if codec.transform == "dct":
        return scipy.fft.dct(blocks, norm="ortho")
    if codec.transform == "hadamard":
        return walsh(blocks)
    return blocks.copy()


def exact_inverse(codec: FFTCodec, coefficients: np.ndarray, block: int) -> np.ndarray:
    """Inverse of exact_transform."""
    span = codec.span or block
    if codec.transform == "fft" and span < block:
        spectra = spans_parted(coefficients.view(np.complex128), span)
        return scipy.fft.irfft(spectra, n=span, norm="ortho").reshape(-1, block)
    if codec.transform == "fft":
        return scipy.fft.irfft(coefficients.view(np.complex128), n=block, norm="ortho")
    if codec.transform == "dct":
        return scipy.fft.idct(coefficients, norm="ortho")
    if codec.transform == "hadamard":
        return walsh(coefficients)
    return coefficients.copy()


def walsh(rows: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard transform by its recursion H_2b = [[H, H], [H, -H]], orthonormal."""
    block = rows.shape[1]
    if block == 1:
        return rows.copy()
    left, right = walsh(rows[:, : block // 2]), walsh(rows[:, block // 2 :])
    return np.hstack([left + right, left - right]) / math.sqrt(2)


def random(n: int, seed: int = 0) -> np.ndarray:
    """Heavy-tailed and smooth at once, as gradients are, [n] float32."""
    rng = np.random.default_rng(seed)
    drift = np.cumsum(rng.standard_normal(n)) / math.sqrt(n or 1)
    return (rng.standard_t(3, n) * 0.1 + drift).astype(np.float32)


def alike(found: Any, expected: Any) -> None:
    """Assert that arrays of any library, lists or dicts of them have the same types and bits."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            alike(one, other)
        return
    one, other = np.asarray(found), np.asarray(expected)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def norm(x: Any) -> float:
    """The 2-norm, in float64."""
    return float(np.linalg.norm(np.asarray(x).astype(np.float64)))


def rows_of(x: np.ndarray, bucket: int | None) -> list[np.ndarray]:
    """Pieces of `bucket` elements; all in one where that is None."""
    step = bucket or max(len(x), 1)
    return [x[start : start + step] for start in range(0, len(x), step)]


def plain_top(x: np.ndarray, k: int) -> list[int]:
    """The k largest magnitudes, ties to the lower position, by sorting pairs."""
    order = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))
    return sorted(order[:k])


def specials(n: int) -> dict[str, np.ndarray]:
    """Finite vectors that trip careless code; float32, [n] each."""
    one = random(n, 9)
    denormal = (np.arange(n) % 7 - 3).astype(np.float32) * np.float32(TINY)
    spike = np.zeros(n, np.float32)
    spike[n // 2 : n // 2 + 1] = 1e30
    return {
        "zeros": np.zeros(n, np.float32),
        "minus zeros": np.full(n, -0.0, np.float32),
        "all equal": np.full(n, 0.3, np.float32),
        "tiny": (one * np.float32(1e-40)).astype(np.float32),
        "denormal": denormal,
        "huge spike": spike,
        "alternating": np.where(np.arange(n) % 2, -2.5, 2.5).astype(np.float32),
        "wide": one * np.float32(10) ** (np.arange(n) % 30 - 15).astype(np.float32),
    }


def codecs(**fixed: object) -> list[FFTCodec]:
    """Settings that between them use every branch of the format."""
    rows = [
        {},
        {"theta": 0.9, "positions": "bitmap"},
        {"theta": 0.5, "block": 64, "bits": 4, "mantissa": 1},
        {"theta": 0.9, "block": 256, "bits": 16, "mantissa": 9},
        {"theta": 0.9, "span": 64, "bits": 4, "mantissa": 1},
        {"theta": 0.5, "block": 64, "span": 32, "values": "2bit", "positions": "bitmap"},
        {"theta": 0.99, "block": 32, "bits": 12, "mantissa": 5, "window": "payload"},
        {"theta": 0.7, "block": None, "positions": "bitmap"},
        {"theta": 0.0, "values": "fp16"},
        {"theta": 0.9, "block": None, "values": "fp16"},
        {"theta": 0.5, "block": 64, "values": "sign"},
        {"theta": 0.9, "block": 256, "values": "2bit", "transform": "dct"},
        {"theta": 0.7, "block": None, "transform": "dct"},
        {"theta": 0.9, "transform": "hadamard", "values": "sign"},
        {"theta": 0.5, "block": None, "transform": "hadamard", "bits": 4, "mantissa": 1},
        {"theta": 0.9, "block": 64, "transform": "identity", "positions": "bitmap"},
        {"theta": 0.0, "block": 128, "transform": "identity", "values": "2bit"},
        {"theta": 0.99, "block": None, "transform": "identity", "values": "fp16"},
    ]
    return [FFTCodec(**(row | fixed)) for row in rows]


def layouts(blocks=(32, 64, 1024, 4096), thetas=(0.0, 0.5, 0.9, 0.98, 0.9999)) -> list[Layout]:
    """The layouts that codecs of many settings give; an odd block comes from block=None."""
    values = [("range", 8, 3), ("range", 4, 1), ("range", 16, 9), ("range", 6, 2)]
    values += [("fp16", 16, 0), ("sign", 1, 0), ("2bit", 2, 0)]
    made = []
    for parts, block, theta, (kind, bits, mantissa), positions in itertools.product(
        (2, 1), (*blocks, 45), thetas, values, ("elias-fano", "bitmap")
    ):
        kept = FFTCodec(theta=theta).kept(block // 2 + 1 if parts == 2 else block)
        if kept < (block // 2 + 1 if parts == 2 else block) or positions == "bitmap":
            made.append(Layout(block, kept, kind, bits, mantissa, positions, parts))
    return made


def read_support(words: np.ndarray, layout: Layout) -> np.ndarray:
    """Positions that each record names, [rows, k], read bit by bit."""
    stream = words_to_bits(words)[:, layout.positions_at :]
    k, f = layout.kept, layout.bins
    if k == f:
        return np.tile(np.arange(f), (len(words), 1))
    if layout.positions == "bitmap":
        return read_bitmap(stream[:, :f], k).astype(np.int64)
    low = k * elias_fano.low_bits(k, f)
    uppers = stream[:, low : layout.position_bits]
    return read_elias_fano(stream[:, :low], uppers, k, f).astype(np.int64)


def edges(layout: Layout) -> list[int]:
    """Coefficients that say nothing of a real vector: the edge bins' imaginary parts."""
    last = layout.bins * layout.parts - 1
    return [] if layout.parts == 1 else [1, last] if layout.block % 2 == 0 else [1]


def vectors(max_size: int = 300, bound: float = 2.0**100) -> st.SearchStrategy[np.ndarray]:
    """Finite float32 vectors; the bound keeps sums of them finite, too."""
    floats = st.floats(-bound, bound, width=32)
    free = st.lists(floats, max_size=max_size).map(lambda x: np.array(x, np.float32))
    # Long vectors of one scale: lists of Hypothesis stay short.
    scaled = st.builds(
        lambda n, seed, power: np.ldexp(random(n, seed), power).astype(np.float32),
        st.integers(0, 20 * max_size),
        st.integers(0, 2**32 - 1),
        st.integers(-130, 60),
    )
    return free | scaled
