"""Speed and size of the FFT codec, compared with its own transform, a memcpy and torch.topk.

    python -m benchmarks codec [--quick] [--json FILE] [--threads N] [--device cuda]
    python -m benchmarks codec --paper [--json FILE]    the paper's settings beside SciPy
    python -m benchmarks codec --family [--json FILE]   every codec by name, see family.py

Every repetition times all contenders in turn, so that noise from other work on the machine hits
them alike; ratios are medians over the repetitions. Encode is with error feedback, as training
uses it. "mean 8" decodes the mean of 8 payloads, of the vector and 7 rotations of it. `gb_s_core`
counts float32 input bytes per second and thread. `--paper` counts CPU seconds, which other work on
the machine changes less, with and without error feedback (the paper has none), at several lengths.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import family
import numpy as np
import scipy.fft
from machine import origin
from rows_file import flags, save
from timing import interleave, timed

from sn_compress import FFTCodec, backends
from sn_compress.codecs.fft import PAPER
from sn_compress.text_table import text_table

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("fft theta 0.98", {"theta": 0.98}),
    ("fft theta 0.9", {"theta": 0.9}),
    ("fft theta 0.98 bits 4", {"theta": 0.98, "bits": 4, "mantissa": 1}),
    ("fft theta 0.98 bits 4 spans", {"theta": 0.98, "bits": 4, "mantissa": 1, "span": 64}),
    ("fft theta 0.98 fp16 values", {"theta": 0.98, "values": "fp16"}),
    ("fft theta 0.98 bitmap", {"theta": 0.98, "positions": "bitmap"}),
    ("fft theta 0.9 whole vector", {"theta": 0.9, "block": None}),
]

# Powers of two; one that is none and that no fast length is near; the 25 million of the others.
PAPER_LENGTHS = [2**20, 2**22, 2**24, 3_141_592, 25_000_000]


def gradient(n: int) -> np.ndarray:
    """A stand-in for a gradient: Laplace values, layers of different scale; seed 0."""
    rng = np.random.default_rng(0)
    values = rng.laplace(size=n).astype(np.float32)
    scales = 10 ** rng.uniform(-4, -1, size=-(-n // 65536))
    return values * np.repeat(scales, 65536)[:n].astype(np.float32)


def topk_with_feedback(values: np.ndarray, keep: float, threads: int) -> Callable[[], object]:
    """Top-k sparsification as it is written with torch: the baseline of most public codecs."""
    import torch

    torch.set_num_threads(threads)
    tensor = torch.from_numpy(values)
    memory = torch.zeros_like(tensor)
    k = max(1, int(keep * tensor.numel()))

    def step() -> object:
        memory.add_(tensor)
        index = torch.topk(memory.abs(), k, sorted=False).indices
        sent = memory[index]
        memory[index] = 0
        return sent, index

    return step


def over(seconds: dict[str, list[float]], top: str, bottom: str) -> float:
    """The median of one's seconds over the other's of the same repetition."""
    return statistics.median(a / b for a, b in zip(seconds[top], seconds[bottom], strict=True))


def measure(name: str, settings: dict[str, Any], values: np.ndarray, args: Any) -> dict[str, Any]:
    """One row: time encode, decode and their yardsticks in turn, `args.repeat` times."""
    n, threads = values.size, args.threads
    codec = FFTCodec(**settings, threads=threads)
    payload = codec.encode(values)
    ranks = [codec.encode(np.roll(values, rank * 999)) for rank in range(8)]
    decoded = codec.decode(payload)
    nmse = float(np.square(values - decoded, dtype=np.float64).sum()) / float(
        np.square(values, dtype=np.float64).sum()
    )
    block = codec.block or n
    blocks = values[: n // block * block].reshape(-1, block)
    spectrum = scipy.fft.rfft(blocks, workers=threads)
    state = codec.new_state(n)
    contenders: dict[str, Callable[[], object]] = {
        "memcpy": values.copy,
        "rfft": lambda: scipy.fft.rfft(blocks, workers=threads),
        "encode": lambda: codec.encode(values, state=state),
        "irfft": lambda: scipy.fft.irfft(spectrum, n=block, workers=threads),
        "decode": lambda: codec.decode(payload),
        "decode_mean": lambda: codec.decode_mean(ranks),
    }
    if not args.no_torch:
        contenders["topk"] = topk_with_feedback(values, 1 - codec.theta, threads)
    steps = {key: partial(timed, run, time.perf_counter) for key, run in contenders.items()}
    seconds = interleave(steps, args.repeat, settle=1)  # the first round warms up
    encode_s, decode_s = (statistics.median(seconds[key]) for key in ("encode", "decode"))
    return {
        "method": name,
        "device": "cpu",
        "backend": backends()["cpu"].partition(":")[0],
        "threads": threads,
        "n": n,
        "payload_bytes": payload.nbytes,
        "ratio": 4 * n / payload.nbytes,
        "nmse": nmse,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "encode_gb_s_core": 4 * n / encode_s / threads / 1e9,
        "decode_gb_s_core": 4 * n / decode_s / threads / 1e9,
        "encode_percent_of_memcpy": 100 / over(seconds, "encode", "memcpy"),
        "decode_percent_of_memcpy": 100 / over(seconds, "decode", "memcpy"),
        "encode_over_rfft": over(seconds, "encode", "rfft"),
        "decode_over_irfft": over(seconds, "decode", "irfft"),
        "decode_mean_of_8_over_irfft": over(seconds, "decode_mean", "irfft"),
        "encode_over_topk": over(seconds, "encode", "topk") if "topk" in contenders else None,
        "repeat": args.repeat,
        **origin(),
    }


def paper(values: np.ndarray, repeat: int) -> dict[str, Any]:
    """One row: the paper's settings, theta 0.9, beside SciPy's transform of the same length."""
    codec = FFTCodec(theta=0.9, **PAPER)
    n, state = values.size, codec.new_state(values.size)
    length = codec.sections(n)[0].layout.block
    padded = np.zeros(length, np.float32)
    padded[:n] = values
    bins, payload = scipy.fft.rfft(padded), codec.encode(values)
    contenders: dict[str, Callable[[], object]] = {
        "rfft": lambda: scipy.fft.rfft(padded),
        "encode": lambda: codec.encode(values),
        "encode_feedback": lambda: codec.encode(values, state=state),
        "irfft": lambda: scipy.fft.irfft(bins, n=length),
        "decode": lambda: codec.decode(payload),
    }
    steps = {key: partial(timed, run) for key, run in contenders.items()}
    seconds = interleave(steps, repeat, settle=1)
    return {
        "method": "paper",
        "device": "cpu",
        "backend": backends()["cpu"].partition(":")[0],
        "threads": 1,
        "n": n,
        "length": length,
        "payload_bytes": payload.nbytes,
        **{f"{key}_cpu_s": statistics.median(seconds[key]) for key in seconds},
        "encode_over_rfft": over(seconds, "encode", "rfft"),
        "encode_feedback_over_rfft": over(seconds, "encode_feedback", "rfft"),
        "decode_over_irfft": over(seconds, "decode", "irfft"),
        "repeat": repeat,
        **origin(),
    }


def paper_table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
    ratios = {
        "encode/rfft": "encode_over_rfft",
        "with feedback": "encode_feedback_over_rfft",
        "decode/irfft": "decode_over_irfft",
    }
    head = ("elements", "rfft, CPU ms", "irfft, CPU ms", *ratios)
    lines = [
        [
            f"{row['n']:,}",
            f"{1e3 * row['rfft_cpu_s']:.1f}",
            f"{1e3 * row['irfft_cpu_s']:.1f}",
            *(f"{row[key]:.2f}" for key in ratios.values()),
        ]
        for row in rows
    ]
    return text_table(head, lines)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
    head = (
        "method", "ratio", "NMSE", "encode", "decode", "enc/rfft", "dec/irfft", "mean 8/irfft",
        "enc/topk", "enc %memcpy",
    )  # fmt: skip
    lines = [["", "x", "", "GB/s/core", "GB/s/core"]]
    for row in rows:
        topk = "-" if row["encode_over_topk"] is None else f"{row['encode_over_topk']:.2f}"
        lines.append(
            [
                row["method"], f"{row['ratio']:.1f}", f"{row['nmse']:.4f}",
                f"{row['encode_gb_s_core']:.2f}", f"{row['decode_gb_s_core']:.2f}",
                f"{row['encode_over_rfft']:.2f}", f"{row['decode_over_irfft']:.2f}",
                f"{row['decode_mean_of_8_over_irfft']:.2f}", topk,
                f"{row['encode_percent_of_memcpy']:.1f}",
            ]
        )  # fmt: skip
    return text_table(head, lines)


def main() -> None:
    """Measure and print; write JSON where asked."""
    parser = flags(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="2 M elements: under two minutes")
    parser.add_argument("--n", type=int, help="elements (default 25 million)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--no-torch", action="store_true", help="leave torch.topk out")
    parser.add_argument("--paper", action="store_true", help="the paper's settings only")
    parser.add_argument("--family", action="store_true", help="all codecs, real and synthetic")
    args = parser.parse_args()
    if args.paper:
        sizes = [args.n] if args.n else PAPER_LENGTHS
        rows = [paper(gradient(n), args.repeat) for n in sizes]
        print(paper_table(rows))
    elif args.family:
        rows = family.rows()
        print(family.table(rows))
    else:
        rows = compare(args)
    save(args.json, rows)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours beside the yardsticks, printed and returned."""
    n = args.n or (2_000_000 if args.quick else 25_000_000)
    if args.device == "cuda":
        import codec_cuda  # asks for CuPy and torch

        n = args.n or (1 << 24 if args.quick else 1 << 27)
        rows = codec_cuda.measure(n, args.repeat, gradient(n))
        text = codec_cuda.table(rows)
    else:
        rows, vector = [], gradient(n)
        for index, (name, settings) in enumerate(SETTINGS, 1):
            print(f"[{index}/{len(SETTINGS)}] {name}", file=sys.stderr, flush=True)
            rows.append(measure(name, settings, vector, args))
        text = table(rows)
    print(f"{n:,} float32 elements, back end {rows[0]['backend']}, {rows[0]['machine']}")
    print(text)
    return rows


if __name__ == "__main__":
    main()
