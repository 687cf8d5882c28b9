"""Runs the fused kernels on arrays of one device, for the tests with and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from host import Host, address

from sn_compress.ops import launch
from sn_compress.ops.launch import Format, Piece

ml_dtypes = pytest.importorskip("ml_dtypes")


@dataclass
class Encoded:
    """What a launch left: records, memory, {saturated, checksum}."""

    words: np.ndarray
    memory: np.ndarray | None
    totals: np.ndarray = field(default_factory=lambda: np.zeros(2, np.uint64))


def encode(
    device: Host,
    form: Format,
    values: np.ndarray,
    memory: np.ndarray | None = None,
    *,
    decay: float = 1.0,
    top: int | None = None,
    first_word: int = 8,
) -> Encoded:
    """Encode one vector; `memory` is copied, outputs are poisoned."""
    per_block = (
        form.layout.bins * form.layout.parts if form.transform == "spectrum" else form.layout.block
    )
    blocks = -(-values.size // per_block)
    done = Encoded(
        np.full((blocks, form.layout.words), 0xDEADBEEF, np.uint32),
        None if memory is None else memory.copy(),
    )
    piece = Piece(
        values=address(values),
        dtype=values.dtype.name,
        elements=values.size,
        blocks=blocks,
        words=address(done.words),
        first_word=first_word,
        totals=address(done.totals),
        memory=address(done.memory),
    )
    launch.encode_blocks(device, form, [piece], decay=decay, top=top)
    return done


def decode(
    device: Host, form: Format, records: np.ndarray, size: int, dtype: str = "float32"
) -> tuple[np.ndarray, int, np.ndarray]:
    """[ranks, blocks, words] -> the mean of the ranks, error flags, checksums by rank."""
    ranks, blocks, words = records.shape
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    out = np.frombuffer(b"\xff" * (size * np.dtype(kind).itemsize), kind).copy()
    flags, totals = np.zeros(1, np.uint32), np.zeros(ranks, np.uint64)
    piece = Piece(
        values=address(out), dtype=dtype, elements=size, blocks=blocks, words=address(records),
        first_word=8, totals=address(totals), memory=address(flags), rank_words=blocks * words,
    )  # fmt: skip
    launch.decode_blocks(device, form, [piece], ranks=ranks, weight=1 / ranks)
    return out, int(flags[0]), totals


def samples(form: Format, blocks: int = 4) -> dict[str, np.ndarray]:
    """Coefficients that are hard on a selection: [blocks, floats] float32 by name."""
    rng = np.random.default_rng(form.layout.block + form.layout.kept)
    shape = (blocks, form.layout.bins * form.layout.parts)
    normal = rng.standard_normal(shape).astype(np.float32)
    scattered = normal * np.float32(10) ** rng.integers(-30, 30, shape).astype(np.float32)
    broken = normal.copy()
    broken[0, 3] = np.nan
    broken[blocks // 2, -2] = np.inf
    broken[-1, 0] = -np.inf
    sparse = np.where(rng.random(shape) < 0.01, normal, 0).astype(np.float32)
    cases = {
        "normal": normal,
        "laplace": rng.laplace(size=shape).astype(np.float32),
        "scattered": scattered,
        "ties": rng.integers(-2, 3, shape).astype(np.float32),
        "equal": np.full(shape, -0.37, np.float32),
        "zeros": np.zeros(shape, np.float32),
        "negative zeros": np.full(shape, -0.0, np.float32),
        "sparse": sparse,
        "non-finite": broken,
        "denormal": (normal * np.float32(1e-41)).astype(np.float32),
        "largest": np.where(normal < 0, -1, 1).astype("f4") * np.finfo("f4").max,
        "huge": (np.clip(normal, -3.4, 3.4) * np.float32(1e38)).astype(np.float32),
    }
    if form.layout.parts == 2:
        for coefs in cases.values():
            coefs[:, [1, -1]] = 0  # what no real vector has
    return cases
