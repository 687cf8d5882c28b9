"""Every codec by name in one table: size, loss and speed, on a real gradient and a synthetic one.

    python -m benchmarks codec --family [--json FILE]

The real one is the largest tensor of the convolutional net (benchmarks/gradients.py), the synthetic
one a Laplace matrix of a million elements. Only the fft family has a compiled back end; the
rivals are the plain NumPy of their definitions, so their speed says nothing of their authors' code.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gradients import load
from machine import origin
from rivals.codecs import codec as codec_of

from sn_compress.text_table import text_table

METHODS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("auto", None, {"ratio": 100}),
    ("fft", None, {}),
    ("fft", "paper", {"theta": 0.9}),
    ("dct", None, {}),
    ("hadamard", None, {}),
    ("axes", None, {"axes": (1,)}),
    ("lowrank", None, {"rank": 4}),
    ("topk", "grace", {}),
    ("topk", "compact", {}),
    ("dgc", "paper", {}),
    ("demo", "paper", {}),
    ("qsgd", "grace", {}),
    ("qsgd", "paper", {}),
    ("terngrad", "grace", {}),
    ("terngrad", "paper", {}),
    ("onebit", "grace", {}),
    ("onebit", "ef-sign", {}),
    ("powersgd", "torch", {}),
    ("fp16", None, {}),
    ("bf16", None, {}),
]
_SHAPED = {"auto", "axes", "lowrank", "powersgd", "demo"}


def inputs() -> dict[str, np.ndarray]:
    """The tensors measured, by name."""
    saved = load()
    last = [value for key, value in saved.items() if key.startswith("cnn/400/3/")]
    rng = np.random.default_rng(0)
    synthetic = rng.laplace(size=(1024, 1024)).astype(np.float32)
    return {"real": max(last, key=lambda value: value.size), "synthetic": synthetic}


def median_s(run: Callable[[], object], repeat: int) -> float:
    """Median seconds of a call, after one to warm up."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def rows(repeat: int = 3) -> list[dict[str, Any]]:
    """One row per method, preset and input."""
    measured = []
    for source, tensor in inputs().items():
        vector = tensor.reshape(-1)
        n = vector.size
        copy_s = median_s(vector.copy, 20)
        for method, preset, settings in METHODS:
            print(f"{source}: {method} {preset or ''}", file=sys.stderr, flush=True)
            shaped = {"shape": tensor.shape} if method in _SHAPED else {}
            codec = codec_of(method, preset=preset, **settings, **shaped)
            state = codec.new_state(n)
            payload = codec.encode(vector, state=state)
            error = np.square(vector.astype(np.float64) - codec.decode(payload)).sum()

            def encode(codec: Any = codec, vector: Any = vector, state: Any = state) -> object:
                return codec.encode(vector, state=state)

            def decode(codec: Any = codec, payload: Any = payload) -> object:
                return codec.decode(payload)

            encode_s, decode_s = median_s(encode, repeat), median_s(decode, repeat)
            measured.append(
                {
                    "source": source,
                    "method": method,
                    "preset": preset,
                    "device": "cpu",
                    "n": n,
                    "bytes": payload.nbytes,
                    "ratio": 4 * n / payload.nbytes,
                    "nmse": float(error / np.square(vector, dtype=np.float64).sum()),
                    "encode_s": encode_s,
                    "decode_s": decode_s,
                    "encode_gb_s": 4 * n / encode_s / 1e9,
                    "decode_gb_s": 4 * n / decode_s / 1e9,
                    "encode_percent_of_copy": 100 * copy_s / encode_s,
                    "decode_percent_of_copy": 100 * copy_s / decode_s,
                    **origin(),
                }
            )
    return measured


def table(measured: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
    lines = []
    for source in dict.fromkeys(row["source"] for row in measured):
        group = [row for row in measured if row["source"] == source]
        head = ("method", "bytes", "ratio", "NMSE", "encode GB/s", "decode GB/s", "% of copy")
        cells = [
            [
                row["method"] + (" " + row["preset"] if row["preset"] else ""),
                f"{row['bytes']:,}", f"{row['ratio']:.1f}", f"{row['nmse']:.2g}",
                f"{row['encode_gb_s']:.3f}", f"{row['decode_gb_s']:.3f}",
                f"{row['encode_percent_of_copy']:.2f}",
            ]
            for row in group
        ]  # fmt: skip
        lines += [f"{source} gradient, {group[0]['n']:,} elements", text_table(head, cells)]
    return "\n".join(lines)
