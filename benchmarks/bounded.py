"""Speed of the bounded codec on one core: pack and unpack of its fixed form, and its paper form.

    python benchmarks/bounded.py [--quick] [--json FILE]

Input is half zeros and half a normal distribution, as after a ReLU. "kept" is what activations
take: codes without a header and checksum; "sent" is a payload, with what was lost left unmeasured.
GB/s are of float32 input per second of processor time; a round trip's time is that of both ways.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, machine

import sn_compress
from sn_compress import _native


def median_s(run: Callable[[], object], repeat: int) -> float:
    """Median processor seconds of a call on one thread, after one to warm up.

    Not the clock on the wall: what else runs on the machine is not what is asked for.
    """
    seconds = []
    for _ in range(repeat + 1):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def row(n: int, repeat: int, way: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One row; the bound is checked on the same data before anything is timed."""
    x = np.maximum(np.random.default_rng(0).standard_normal(n), 0).astype(np.float32)
    codec: Any = sn_compress.codec("bounded", measure=False, **settings)
    encode = codec.quantise if way == "kept" else codec.encode
    made = encode(x)
    decode = (lambda: codec.restore(made, n)) if way == "kept" else (lambda: codec.decode(made))
    if np.abs(decode() - x).max() > settings["bound"]:
        raise AssertionError(f"the bound is broken: {codec}")
    kept = codec.kept_bytes(made) if way == "kept" else made.nbytes
    encode_s, decode_s = median_s(lambda: encode(x), repeat), median_s(decode, repeat)
    return {
        "way": way,
        "form": codec.form,
        "bits": settings.get("bits"),
        "bound": settings["bound"],
        "back_end": "numpy" if _native.core() is None else "cpp",
        "n": n,
        "bits_per_element": 8 * kept / n,
        "encode_gb_s": 4 * n / encode_s / 1e9,
        "decode_gb_s": 4 * n / decode_s / 1e9,
        "round_trip_gb_s": 4 * n / (encode_s + decode_s) / 1e9,
        "commit": commit(),
        "machine": machine(),
    }


def main() -> None:
    """Measure, print, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the elements")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    n, repeat = (2**20, 5) if args.quick else (2**24, 9)
    cases: list[tuple[str, dict[str, Any]]] = [
        (way, {"bound": math.inf, "bits": bits})
        for way in ("kept", "sent")
        for bits in (1, 2, 4, 8)
    ]
    cases += [("kept", {"bound": 0.25, "bits": 4}), ("kept", {"bound": 0.25, "form": "paper"})]
    rows = []
    for way, settings in cases:
        rows.append(found := row(n, repeat, way, settings))
        print(
            f"{way} {found['form']:5} {found['bits'] or '':1} bound {found['bound']:<5} "
            f"{found['bits_per_element']:6.3f} bits/element  encode {found['encode_gb_s']:6.2f}  "
            f"decode {found['decode_gb_s']:6.2f}  both {found['round_trip_gb_s']:6.2f} GB/s",
            file=sys.stderr,
            flush=True,
        )
    if args.json:
        plain = [{**r, "bound": None if math.isinf(r["bound"]) else r["bound"]} for r in rows]
        args.json.write_text(json.dumps(plain, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
