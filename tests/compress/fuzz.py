"""Attack the decoder: damaged payloads either raise PayloadError or decode to the promised size.

Run by test_fuzz.py in process, and as a script in a process with a sanitized extension:

    python tests/compress/fuzz.py COUNT SEED [path of another _core*.so]
"""

from __future__ import annotations

import importlib.util
import struct
import sys
import time
import zlib
from collections import Counter
from typing import Any

import numpy as np

Target = tuple[Any, list[Any], list[bytes]]  # codec, payloads, their bytes
SETTINGS = (
    {"theta": 0.9},
    {"theta": 0.5, "block": 64, "bits": 4, "mantissa": 1},
    {"theta": 0.9, "block": 256, "positions": "bitmap", "bits": 11, "mantissa": 5},
    {"theta": 0.8, "block": None, "values": "fp16"},
    {"theta": 0.99, "block": 32, "bits": 16, "mantissa": 9},
    {"theta": 0.0, "block": 128, "values": "fp16", "positions": "bitmap"},
    {"theta": 0.9, "transform": "dct", "values": "2bit"},
    {"theta": 0.5, "block": None, "transform": "hadamard", "values": "sign"},
    {"theta": 0.9, "block": 64, "transform": "identity", "bits": 4, "mantissa": 1},
    {"theta": 0.0, "block": 256, "transform": "identity", "values": "2bit"},
    {"theta": 0.8, "block": 128, "transform": "axes", "shape": (37, 7, 3), "axes": (1, 2)},
)
LENGTHS = (1, 40, 300, 777)
SIZES_CLAIMED = (
    0, 1, 31, 776, 778, 2**31 - 1, 2**31, 2**32, 2**40, 2**48, 2**48 + 1, 2**63, 2**64 - 1,
)  # fmt: skip
# One phrase of each message, in the order of the checks.
REFUSALS = (
    "are not a payload", "not a payload of this format", "Do all ranks run the same model?",
    "header claims", "checksum is", "gathered", "with settings",
    "in the fixed size", "damaged", "range ends", "marks", "ascend", "there is room",
)  # fmt: skip
WORDS = (0, 1, 0x7F80, 0x7FC0, 0x7F7F, 0xFFFF, 0x80000000, 0xFFFFFFFF, 0x7FC0FFFF)


# How often each kind of damage is done: mostly such as get past the header's checks.
KINDS = (0.25, 0.15, 0.05, 0.05, 0.1, 0.1, 0.05, 0.05, 0.2)


def reseal(data: bytearray) -> bytes:
    """Make the checksum right, so that what is behind it is attacked; see docs/format.md."""
    if len(data) < 32 or len(data) % 4:
        return bytes(data)
    data[28:32] = bytes(4)
    if data[2] == 1:
        words = np.frombuffer(bytes(data), "<u4").astype(np.uint64)
        factors = np.arange(1, 2 * words.size, 2, dtype=np.uint64)
        total = int((words * factors % 2**32).sum()) % 2**32
    else:
        total = zlib.crc32(data)
    data[28:32] = struct.pack("<I", total)
    return bytes(data)


def damage(rng: np.random.Generator, seeds: list[bytes], *, sealed: float = 0.8) -> bytes:
    """Change one payload in one to three ways; so often the checksum is made right again."""
    pick = lambda: seeds[rng.integers(len(seeds))]  # noqa: E731
    data = bytearray(pick())
    for _ in range(rng.integers(1, 4)):
        kind = rng.choice(9, p=KINDS)
        size = len(data)
        first = 32 if size > 32 and rng.random() < 0.8 else 0
        if kind == 0 and size:  # bits
            for at in rng.integers(first, size, size=rng.integers(1, 9)):
                data[at] ^= 1 << rng.integers(8)
        elif kind == 1 and size:  # bytes
            for at in rng.integers(first, size, size=rng.integers(1, 9)):
                data[at] = rng.integers(256)
        elif kind == 2:  # cut, often at a multiple of 16
            at = int(rng.integers(size + 1))
            del data[at // 16 * 16 if rng.random() < 0.7 else at :]
        elif kind == 3:  # join
            data += pick()[32 * int(rng.integers(2)) :]
        elif kind == 4:  # the head of one, the body of another
            at = int(rng.integers(size // 4 + 1)) * 4
            data[at:] = pick()[at:]
        elif kind == 5:  # noise in its place, in that of the body, or behind it
            at = int(rng.choice([0, 32, 32, 32, size]))
            data[at:] = rng.bytes(
                max(size - at, 0) if rng.random() < 0.8 else 16 * rng.integers(40)
            )
        elif kind == 6 and size >= 32:  # elements claimed
            data[4:12] = int(rng.choice(np.array(SIZES_CLAIMED, np.uint64))).to_bytes(8, "little")
        elif kind == 7 and size >= 32:  # other header fields to extremes
            at = int(rng.choice([0, 2, 3, *range(12, 20), 20, 24]))
            data[at] = int(rng.choice([0, 1, 2, 127, 128, 255]))
        elif kind == 8 and size >= 36:  # words of the body
            at = 32 + int(rng.integers((size - 32) // 4)) * 4
            data[at : at + 4] = struct.pack("<I", int(rng.choice(np.array(WORDS, np.uint32))))
    return reseal(data) if rng.random() < sealed else bytes(data)


def codecs() -> list[object]:
    """The targets: at least one of every codec."""
    from sn_compress import FFTCodec
    from sn_compress.codecs.bounded import BoundedCodec

    return [
        *(FFTCodec(**settings) for settings in SETTINGS),
        BoundedCodec(bound=0.1, bits=2, group=32, escapes=0.1),
        BoundedCodec(bound=float("inf"), bits=1),
    ]


def rivals() -> list[object]:
    """One of every other codec of the registry, and the form whose size depends on the data."""
    from sn_compress import codec

    return [
        codec("topk", theta=0.9),
        codec("topk", preset="compact"),
        codec("topk", theta=0.9, chunk=60, indices="packed", values="fp16"),
        codec("qsgd"),
        codec("qsgd", preset="grace"),
        codec("terngrad", bucket=300),
        codec("terngrad", preset="grace"),
        codec("onebit"),
        codec("onebit", preset="ef-sign"),
        codec("fp16"),
        codec("bf16"),
        codec("fp8"),
        codec("bounded", bound=0.01, form="paper"),
    ]


def targets(codecs: list[object], rng: np.random.Generator) -> list[Target]:
    """Each codec with sound payloads of it, of a vector with and without NaN; some of version 1."""
    found = []
    for codec in codecs:
        payloads = []
        for n in LENGTHS if getattr(codec, "shape", None) is None else (777,):
            x = rng.standard_t(3, n).astype(np.float32)
            payloads.append(codec.encode(x))
            x[n // 2] = np.nan
            payloads.append(codec.encode(x, state=codec.new_state(n)))
        seeds = [p.to_bytes() for p in payloads]
        old = bytearray(seeds[-1])
        old[2] = 1
        found.append((codec, payloads, [*seeds, reseal(old)]))
    return found


def attack(count: int, seed: int = 0) -> Counter[str]:
    """Run `count` cases; how often each outcome was seen. Anything unexpected is raised."""
    from sn_compress import Payload, PayloadError
    from sn_compress.codecs.base import mean_of_gathered

    rng = np.random.default_rng(seed)
    seen: Counter[str] = Counter()
    bench = targets(codecs(), rng)
    every = [data for _, _, seeds in bench for data in seeds]
    for case in range(count):
        codec, payloads, seeds = bench[case % len(bench)]
        data = damage(rng, every if case % 7 == 0 else seeds)
        sound = payloads[rng.integers(len(payloads))]
        try:
            if case % 5 == 0:
                both = np.frombuffer(sound.to_bytes() + data, np.uint8)
                out, n = mean_of_gathered(codec, both, 2, sound.n), sound.n
            else:
                shift = case % 3  # a peer's buffer may start at any address
                payload = Payload.from_bytes(memoryview(bytes(shift) + data)[shift:])
                out, n = codec.decode(payload), payload.n
                assert codec.payload_bytes(n) == len(data)
        except PayloadError as error:
            seen[next(phrase for phrase in REFUSALS if phrase in str(error))] += 1
            continue
        assert out.dtype == np.float32
        assert out.shape == (n,)
        seen["decoded"] += 1
    return seen


def main() -> None:
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    if len(sys.argv) > 3:
        spec = importlib.util.spec_from_file_location("sn_compress._core", sys.argv[3])
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    from sn_compress import _native

    start = time.perf_counter()
    seen = attack(count, seed)
    core = _native.core()
    print(f"{count} cases in {time.perf_counter() - start:.1f} s")
    print(f"extension {core.__spec__.origin if core else None}")
    for outcome, times in seen.most_common():
        print(f"{times:8d} {outcome}")


if __name__ == "__main__":
    main()
