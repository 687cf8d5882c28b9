"""Make the golden payloads: `python tests/golden/make.py`, from a clone with the package installed.

It never overwrites: a payload of an old version is worth having because it is old. To add one, add
a line to CASES; to go on after a change of version, give the new ones new names.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from sn_compress import Codec, FFTCodec, Payload, codec
from sn_compress.ops.record import decode_records

HERE = Path(__file__).resolve().parent
OVER_AXES = {
    "block": 256, "transform": "axes", "shape": [10, 12, 3, 3], "axes": [2, 3],
    "positions": "bitmap",
}  # fmt: skip
# Name, number of elements, settings, elements that are not finite.
CASES: list[tuple[str, int, dict[str, object], dict[int, float]]] = [
    ("v1-default", 10_000, {}, {}),
    ("v1-bitmap", 2_000, {"theta": 0.9, "block": 256, "positions": "bitmap"}, {}),
    ("v1-fp16", 700, {"theta": 0.75, "block": 128, "values": "fp16"}, {}),
    ("v1-whole", 3_001, {"theta": 0.9, "block": None}, {}),
    ("v1-paper", 3_001, {"theta": 0.9, "block": None, "positions": "bitmap", "half": True}, {}),
    ("v1-four-bits", 320, {"theta": 0.9, "block": 32, "bits": 4, "mantissa": 1}, {}),
    ("v1-sixteen-bits", 300, {"theta": 0.5, "block": 32, "bits": 16, "mantissa": 9}, {}),
    ("v1-clipped", 200, {"theta": 0.5, "block": 64, "window": 1.0}, {}),
    ("v1-non-finite", 200, {"theta": 0.5, "block": 64}, {5: np.nan, 150: -np.inf}),
    ("v1-dct-sign", 3_000, {"theta": 0.75, "block": 256, "transform": "dct", "values": "sign"}, {}),
    ("v1-fft-2bit", 700, {"theta": 0.75, "block": 128, "values": "2bit"}, {9: np.inf}),
    ("v1-hadamard", 900, {"theta": 0.8, "block": None, "transform": "hadamard"}, {}),
    ("v1-top-k", 5_000, {"theta": 0.98, "block": 1024, "transform": "identity"}, {}),
    ("v1-all-kept", 300, {"theta": 0.0, "transform": "identity", "values": "2bit"}, {}),
    ("v1-axes", 1_080, OVER_AXES | {"theta": 0.9, "bits": 6, "mantissa": 2}, {}),
    ("v1-empty", 0, {}, {}),
]
HALF = {"indices": "packed", "values": "fp16"}
# Name, method of the registry, number of elements, settings.
METHODS: list[tuple[str, str, int, dict[str, object]]] = [
    ("v1-topk", "topk", 5_000, {"theta": 0.99}),
    ("v1-topk-grace", "topk", 200, {"preset": "grace"}),
    ("v1-topk-compact", "topk", 9_000, {"preset": "compact"}),
    ("v1-topk-half", "topk", 500, {"theta": 0.9, "chunk": 60} | HALF),
    ("v1-qsgd", "qsgd", 1_000, {}),
    ("v1-qsgd-grace", "qsgd", 300, {"preset": "grace"}),
    ("v1-terngrad", "terngrad", 1_001, {"bucket": 300}),
    ("v1-terngrad-paper", "terngrad", 1_001, {"preset": "paper"}),
    ("v1-terngrad-grace", "terngrad", 300, {"preset": "grace"}),
    ("v1-onebit", "onebit", 1_001, {}),
    ("v1-onebit-sign", "onebit", 1_001, {"preset": "ef-sign"}),
    ("v1-onebit-grace", "onebit", 300, {"preset": "grace"}),
    ("v1-bounded", "bounded", 700, {"bound": 0.05, "bits": 2, "group": 64}),
    ("v1-bounded-one-bit", "bounded", 300, {"bound": 0.25, "bits": 1, "escapes": 0.5}),
    ("v1-bounded-paper", "bounded", 700, {"bound": 0.01, "form": "paper"}),
    ("v1-cast-fp16", "fp16", 100, {}),
    ("v1-cast-bf16", "bf16", 100, {}),
]
# What version 2 changed is the checksum alone, so its payloads are those of version 1 made anew.
CASES += [("v2" + name[2:], *rest) for name, *rest in CASES]
METHODS += [("v2" + name[2:], *rest) for name, *rest in METHODS]
METHODS += [("v2-cast-fp8", "fp8", 700, {})]
CASES += [
    ("v2-spans", 5_000, {"theta": 0.95, "span": 64, "bits": 4, "mantissa": 1}, {}),
    # By the FFT of our own that there was for long vectors.
    ("v2-long", 100_000, {"theta": 0.999, "block": None}, {}),
]
# Version 3 is of one FFT over the vector, by SciPy; its coefficients may differ from version 2's.
CASES += [
    ("v3" + name[2:], *rest) for name, *rest in CASES if name in ("v2-whole", "v2-paper", "v2-long")
]
TRANSFORMS = ("fft", "dct", "hadamard", "axes")  # those of CASES


def vector(n: int, bad: dict[int, float]) -> np.ndarray:
    """Deterministic on every machine: a linear congruential generator's slow and fast parts."""
    state, values = 1, []
    for i in range(n):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        values.append((state / 2**31 - 0.5) ** 3 + abs(i % 100 - 50) / 100)
    x = np.array(values, np.float32)
    for at, value in bad.items():
        x[at] = value
    return x


def coefficients(codec: FFTCodec, payload: Payload) -> list[np.ndarray]:
    """What the records hold, [blocks, bins * parts] float32 per section: exact on every machine."""
    words = payload.body.view("<u4")
    found = []
    for s in codec.sections(payload.n):
        rows = words[s.words_at : s.words_at + s.count * s.layout.words].reshape(s.count, -1)
        accum = np.zeros((s.count, s.layout.bins * s.layout.parts), np.float32)
        decode_records(rows, accum, s.layout, 1.0)
        found.append(accum)
    return found


def digest(parts: list[np.ndarray]) -> str:
    """SHA-256 over the float bits of the coefficients, every NaN counted as the same one."""
    total = hashlib.sha256()
    for part in parts:
        floats = part.copy()
        floats[np.isnan(floats)] = np.float32(np.nan)
        total.update(floats.astype("<f4").tobytes())
    return total.hexdigest()


def method(name: str, settings: dict[str, object]) -> Codec:
    """The codec of an entry; JSON keeps no tuples."""
    plain = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    return codec(name, **plain)


def of_method(kind: str, n: int, settings: dict[str, object]) -> tuple[Payload, dict[str, object]]:
    """The payload and the entry of one of METHODS."""
    made = method(kind, settings)
    payload = made.encode(vector(n, {}))
    decoded = digest([made.decode(payload)])
    return payload, {"codec": kind, "n": n, "settings": settings, "decoded_sha256": decoded}


def of_case(
    n: int, settings: dict[str, object], bad: dict[int, float]
) -> tuple[Payload, dict[str, object]]:
    """The payload and the entry of one of CASES."""
    made = FFTCodec(**settings)
    payload = made.encode(vector(n, bad))
    return payload, {
        "n": n,
        "settings": settings,
        "coefficients_sha256": digest(coefficients(made, payload)),
        "non_finite": {str(at): repr(float(value)) for at, value in bad.items()},
    }


def main() -> None:
    index = HERE / "payloads.json"
    entries = json.loads(index.read_text("utf-8")) if index.exists() else {}
    jobs = [(of_method, it) for it in METHODS] + [(of_case, it) for it in CASES]
    for make, (name, *how) in jobs:
        file = HERE / f"{name}.bin"
        if name in entries or file.exists():
            print(f"{name}: is there, left alone")
            continue
        payload, entry = make(*how)
        file.write_bytes(payload.to_bytes())
        entries[name] = entry | {"saturated": payload.saturated}
        print(f"{name}: {payload.nbytes} bytes")
    rows = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    index.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
